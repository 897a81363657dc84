"""The stages of `megatron-rl check`: conversion, parity, replay and sync, on a small copy of the user's model and layout.

    report = check.check(config)             # all stages; local processes on the CPU, which end with it
    report.failed                            # names of the stages that failed
    table.print_report(report, Console())

shrink makes the copy; oracle is transformers' model in float64, which also samples the sequences; ranks holds what the trainer's
ranks run; stages compares; faults are injected on purpose, to see that each stage can fail.

Importing this package loads nothing else: the ranks import parts of it and do not need transformers.
"""
