"""What the ranks run."""

from megatron_rl.engine.optimizers.megatron_state import torch_optimizers
from tests.distributed.engine.cases import Run, Setting, laid_out


def buffers(rank: int, setting: Setting) -> dict[str, int]:
    """Bytes of Megatron's own buffers and of the optimizer's state on one rank."""
    with laid_out(setting) as groups:
        engine = Run(groups, setting).engine
        own = [buffer for model in engine.models for buffer in (*model.buffers, *model.expert_parallel_buffers)]
        inner = torch_optimizers(engine.optimizer.megatron)
        states = [state for optimizer in inner for state in optimizer.state.values()]
        masters = [p for optimizer in inner for group in optimizer.param_groups for p in group["params"]]
        return {
            "parameters": sum(b.param_data.numel() * b.param_data.element_size() for b in own),
            "gradients": sum(b.grad_data.numel() * b.grad_data.element_size() for b in own),
            "optimizer state": sum(t.numel() * 4 for state in states for name, t in state.items() if name.startswith("exp_")),
            # In fp32 the optimizer works on the parameters themselves.
            "master weights": 0 if setting.dtype == "float32" else sum(p.numel() * p.element_size() for p in masters),
        }
