"""What an optimizer costs a rank: bytes of its state, bytes and seconds of its update; one class for each `optimizer.name`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from megatron_rl.planner.counts import ChunkElements, ParameterCounts
from megatron_rl.planner.machine import Machine
from megatron_rl.planner.workload import Candidate, Workload

MUON_BATCH = 16 << 20
"""Elements of the matrices that are orthogonalised together."""
NEWTON_SCHULZ_STEPS = 5
FP32_SLOWDOWN = 15.0
"""Of products in fp32 against bf16: an H100's data sheet says 67 against 989 TFLOPS."""


class OptimizerCosts(ABC):
    """Of one optimizer, at any layout."""

    @abstractmethod
    def state_bytes(self, shard: float, matrix_shard: float) -> float:
        """Bytes of the moments on one data-parallel rank.

        Args:
            shard: Elements of parameters that the rank updates.
            matrix_shard: Those of them in weight matrices of attention, MLPs and experts.
        """

    @abstractmethod
    def update_bytes(
        self, work: Workload, candidate: Candidate, held: Sequence[ChunkElements], largest: int, num_layers: int
    ) -> float:
        """Bytes that an update needs for its time, beyond the state.

        Args:
            work: The training step.
            candidate: The layout and its microbatches.
            held: Elements of each of the stage's chunks.
            largest: Elements of the largest matrix.
            num_layers: Layers of the stage.
        """

    @abstractmethod
    def update_seconds(self, counts: ParameterCounts, work: Workload, candidate: Candidate, machine: Machine) -> float:
        """Seconds of one update on the slowest stage."""


class AdamWCosts(OptimizerCosts):
    """Two fp32 moments of each element; the update is bound by memory."""

    bytes_per_element = 30.0
    """Read and written in an update: gradient, master weight and moments in fp32, the new weight in the model's type."""

    def state_bytes(self, shard: float, matrix_shard: float) -> float:
        """Bytes of the moments on one data-parallel rank."""
        return 8.0 * shard

    def update_bytes(
        self, work: Workload, candidate: Candidate, held: Sequence[ChunkElements], largest: int, num_layers: int
    ) -> float:
        """Nothing beyond the state."""
        return 0.0

    def update_seconds(self, counts: ParameterCounts, work: Workload, candidate: Candidate, machine: Machine) -> float:
        """Seconds of one update on the slowest stage."""
        layout = candidate.layout
        shards = []
        for stage in range(layout.pp):
            dense, expert = counts.buffer_sizes(layout, stage)
            shards.append(dense / (layout.dp * layout.cp) + expert / layout.edp)
        return max(shards) * self.bytes_per_element / (machine.hbm_gb_s * 1e9 * machine.memory_efficiency)


class MuonCosts(AdamWCosts):
    """One fp32 momentum of matrices and AdamW for the rest.

    The iteration is spread over the ranks that share a matrix's replicas.
    """

    def state_bytes(self, shard: float, matrix_shard: float) -> float:
        """Bytes of the moments on one data-parallel rank."""
        return 8.0 * shard - 4.0 * matrix_shard

    def update_bytes(
        self, work: Workload, candidate: Candidate, held: Sequence[ChunkElements], largest: int, num_layers: int
    ) -> float:
        """A rank's share of two rounds, sent and received, and four fp32 copies of the matrices orthogonalised together."""
        layout = candidate.layout
        share = 4 * sum(part.dense.matrices / (layout.dp * layout.cp) + part.expert.matrices / layout.edp for part in held)
        of_round = min(share, max(work.muon_round_bytes, share / num_layers))  # one layer at least
        return 4 * of_round + 4 * 4.0 * max(largest, MUON_BATCH)

    def update_seconds(self, counts: ParameterCounts, work: Workload, candidate: Candidate, machine: Machine) -> float:
        """Seconds of one update on the slowest stage."""
        layout = candidate.layout
        products = []
        for stage in range(layout.pp):
            held = [counts.chunk(layout, stage, chunk) for chunk in range(layout.vpp)]
            matrices = sum(part.dense.matrices / (layout.dp * layout.cp) + part.expert.matrices / layout.edp for part in held)
            smaller = min(counts.architecture.hidden_size, _smaller_side(counts))
            products.append(matrices * smaller * 2.0 * 3 * NEWTON_SCHULZ_STEPS)
        rate = machine.bf16_tflops * 1e12 * machine.matmul_efficiency / (FP32_SLOWDOWN if work.muon_in_fp32 else 1.0)
        return super().update_seconds(counts, work, candidate, machine) + max(products) / rate


def _smaller_side(counts: ParameterCounts) -> int:
    model = counts.architecture
    return model.moe.ffn_hidden_size if model.moe else model.hidden_size


OPTIMIZERS: dict[str, OptimizerCosts] = {"adamw": AdamWCosts(), "muon": MuonCosts()}
"""By `optimizer.name`."""
