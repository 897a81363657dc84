"""What the microbatches of a rank hold."""

from dataclasses import dataclass, replace

import numpy as np

from megatron_rl.records import ModelContract


@dataclass(frozen=True)
class AssemblyOptions:
    """What a rank's microbatches hold. Only moe_layers may differ between the ranks of one data-parallel replica."""

    contract: ModelContract
    max_tokens: int
    """Packed tokens of a microbatch, alignment's padding not counted."""
    sequence_parallel: bool = False
    rank_multiple: int = 1
    """The positions that a rank's linear layers see are a multiple of this; see Config.rank_multiple."""
    keep_set_replay: bool = True
    """False: every loss token is normalised over the full vocabulary, whatever its recorded set."""
    routing_replay: bool = True
    moe_layers: tuple[int, ...] = ()
    """The MoE layers of this rank, by their number among the model's MoE layers, in the order in which its routers want them."""
    route_shift: int = 0
    """For a diagnosis: position i gets the recorded experts of position i + route_shift of its sequence; where there is none,
    none."""

    @property
    def replays_routes(self) -> bool:
        """Whether microbatches hold recorded experts."""
        return self.routing_replay and self.contract.num_moe_layers > 0

    @property
    def readable_contract(self) -> ModelContract:
        """The contract of a record of which only this rank's routes were read."""
        layers = tuple(self.contract.moe_layers[n] for n in self.moe_layers) if self.replays_routes else ()
        return replace(self.contract, moe_layers=layers)

    @property
    def route_dtype(self) -> type[np.unsignedinteger]:
        """Dtype of the routes. Its largest value is no expert: it marks a position without a recorded route."""
        return np.uint8 if self.contract.num_experts < 256 else np.uint16
