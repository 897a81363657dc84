"""The `gloo` weight transfer engine: buckets of tensors from trainer rank 0, checked, and loaded layer by layer."""

from dataclasses import dataclass
from typing import Any

import torch
import vllm
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.logger import init_logger

from megatron_rl.errors import RunError
from megatron_rl.inference.vllm.plugin.reload import LayerwiseReload, RefusedWeightError, pack_experts_on_reload
from megatron_rl.inference.vllm.plugin.versions import require_known_vllm
from megatron_rl.precision.unpacking import Unpacker
from megatron_rl.wire.tensor_spec import TensorSpec
from megatron_rl.wire.weights import (
    NO_VERSION,
    Bucket,
    ChecksumError,
    WeightGroup,
    join_weight_group,
    plan_buckets,
    unpack_bucket,
)

logger = init_logger(__name__)


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Where this server's group has its store. The sender is rank 0, then come the workers; `world_size` counts all of them."""

    host: str
    port: int
    world_size: int
    timeout_s: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """What will be broadcast: the policy version, and all tensors in the order of the stream (three lists of equal length)."""

    version: int
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    bucket_bytes: int

    def buckets(self) -> list[Bucket]:
        """The buckets of the stream, as the sender derives them."""
        specs = [
            TensorSpec(name, tuple(shape), dtype) for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True)
        ]
        return plan_buckets(specs, self.bucket_bytes)


class RefusedUpdateError(RunError):
    """The update arrived complete, but the model did not take it; the message lists every reason."""


class GlooWeightTransferEngine(WeightTransferEngine):
    """Receives full updates over Gloo. `held_version` is the policy version of the last update that was finished."""

    init_info_cls, update_info_cls = GlooInitInfo, GlooUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        require_known_vllm(vllm.__version__)
        pack_experts_on_reload()
        self._reload = LayerwiseReload(self.model)
        self._group: WeightGroup | None = None
        self._incoming_version = NO_VERSION
        self.held_version = NO_VERSION

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the sender's group. A former one, which may be broken, is dropped."""
        self._group = None
        rank = 1 + self.parallel_config.rank
        self._group = join_weight_group(init_info.host, init_info.port, rank, init_info.world_size, init_info.timeout_s)

    def start_weight_update(self) -> None:
        """Begin a full update."""
        self.held_version = self._incoming_version = NO_VERSION  # from here on the model is no version's
        self._reload.start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive the stream that `update_info` announces."""
        # The base class synchronizes an accelerator afterwards, which a CPU server does not have; Gloo is done when it returns.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receive and load every bucket.

        A refused tensor does not end the stream: the sender would wait for this receiver until its timeout. The buckets that
        follow are received and dropped, and the reasons are raised at the end.
        """
        if self._group is None:
            raise RuntimeError("update_weights came before init_weight_transfer_engine: this server is in no weight group")
        problems: list[str] = []
        unpacker = self._unpacker(update_info.names)
        for bucket in update_info.buckets():
            # A fresh buffer each time: the reload keeps views of it until the modules that they belong to are complete.
            buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8)
            self._group.broadcast(buffer).wait()
            if not problems:
                problems = self._load(bucket, buffer, unpacker)
        if not problems and unpacker.incomplete:
            problems = [f"only a part of the NVFP4 tensors of these weights arrived: {unpacker.incomplete}"]
        if problems:
            raise RefusedUpdateError("; ".join(problems))
        self._incoming_version = update_info.version

    def _unpacker(self, names: list[str]) -> Unpacker:
        """A model that was built for NVFP4 takes packed weights as they are; any other gets their values."""
        is_plain = self.model_config.quantization is None
        return Unpacker(names if is_plain else [], self.model_config.dtype)

    def _load(self, bucket: Bucket, buffer: torch.Tensor, unpacker: Unpacker) -> list[str]:
        """Load one bucket; returns why it was refused."""
        try:
            for name, tensor in unpack_bucket(bucket, buffer):
                if (complete := unpacker.add(name, tensor)) is not None:
                    self._reload.load(*complete)
        except (ChecksumError, RefusedWeightError) as error:
            logger.exception("weight update refused")
            return [str(error)]
        return []

    def finish_weight_update(self) -> None:
        """Complete the update; from here on the model is that version's."""
        self._reload.finish(self.model_config)
        self.held_version = self._incoming_version

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None
