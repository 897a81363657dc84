"""What an optimizer costs a rank: bytes of its state, bytes and seconds of its update. One class per `optimizer.name`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from megatron_rl.planner.counts import ChunkElements, ParameterCounts
from megatron_rl.planner.machine import Machine
from megatron_rl.planner.workload import Candidate, Workload

MUON_BATCH = 16 << 20
"""Elements of the matrices that are orthogonalised together."""
NEWTON_SCHULZ_STEPS = 5
FP32_SLOWDOWN = 15.0
"""Time of a product in fp32 over its time in bf16: an H100's data sheet has 67 and 989 TFLOPS."""


class OptimizerCosts(ABC):
    """Costs of one optimizer at any layout."""

    @abstractmethod
    def state_bytes(self, shard: float, matrix_shard: float) -> float:
        """Bytes of the moments on one data-parallel rank.

        Args:
            shard: Elements of the parameters that the rank updates.
            matrix_shard: Of these, the elements in weight matrices of attention, MLPs and experts.

        Returns:
            The bytes.
        """

    @abstractmethod
    def update_bytes(
        self, work: Workload, candidate: Candidate, held: Sequence[ChunkElements], largest: int, num_layers: int
    ) -> float:
        """Bytes that are allocated only during an update, beyond the state.

        Args:
            work: The training step.
            candidate: The layout and its microbatches.
            held: Elements of each of the stage's chunks.
            largest: Elements of the largest matrix.
            num_layers: Layers of the stage.

        Returns:
            The bytes.
        """

    @abstractmethod
    def update_seconds(self, counts: ParameterCounts, work: Workload, candidate: Candidate, machine: Machine) -> float:
        """Seconds of one update on the slowest stage.

        Args:
            counts: Parameters of the model.
            work: The training step.
            candidate: The layout.
            machine: The machine.

        Returns:
            The seconds.
        """


class AdamWCosts(OptimizerCosts):
    """AdamW: two fp32 moments per element; the update is bound by memory bandwidth."""

    bytes_per_element = 30.0
    """Bytes that an update reads and writes: gradient, master weight and moments in fp32, the new weight in the model's dtype."""

    def state_bytes(self, shard: float, matrix_shard: float) -> float:
        """Bytes of two fp32 moments per element."""
        return 8.0 * shard

    def update_bytes(
        self, work: Workload, candidate: Candidate, held: Sequence[ChunkElements], largest: int, num_layers: int
    ) -> float:
        """AdamW allocates nothing beyond its state."""
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
    """Muon: one fp32 momentum per element of the matrices, and AdamW for the other parameters.

    The ranks that hold replicas of a matrix divide the orthogonalisation among themselves.
    """

    def state_bytes(self, shard: float, matrix_shard: float) -> float:
        """Bytes of one fp32 moment per element of the matrices, two per element of the others."""
        return 8.0 * shard - 4.0 * matrix_shard

    def update_bytes(
        self, work: Workload, candidate: Candidate, held: Sequence[ChunkElements], largest: int, num_layers: int
    ) -> float:
        """Bytes of two rounds, sent and received, and of four fp32 copies of the matrices that are orthogonalised together."""
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
"""The costs by `optimizer.name`."""
