"""Where the mismatch of a recorded step comes from: its rollouts scored again with one thing changed at a time.

    record    the step's loss tokens, from the spool
    scoring   the ways to score them, and what is sent to the ranks
    factors   which single changes apply to this run, and which known faults are tried
    ranks     what a trainer rank does
    shares    from log-probs to numbers, worst tokens and named faults
    table     the same for a person

Importing this package loads nothing else.
"""
