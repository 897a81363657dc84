"""Sends a version of the policy to the rollout servers."""

import logging
import os
from collections.abc import Iterator, Sequence
from typing import cast

import torch

from megatron_rl.config import Config
from megatron_rl.engine.engine import Engine
from megatron_rl.inference.engine import InferenceEngine
from megatron_rl.inference.registry import engine_of
from megatron_rl.inference.sender import ServerAddress, WeightSender
from megatron_rl.trainer.ranks import broadcast_object
from megatron_rl.trainer.steering import Steering
from megatron_rl.weight_sync import update_servers
from megatron_rl.wire.control import WeightsReport
from megatron_rl.wire.nodes import ADDRESS_VARIABLE

logger = logging.getLogger(__name__)


class PolicySource:
    """The engine's weights as a sender reads them; iterating is a collective of the trainer's ranks."""

    def __init__(self, engine: Engine) -> None:
        self._tensors = engine.rollout_tensors()
        self.specs = self._tensors.specs

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        # Other ranks than 0 get (name, None), and drop it.
        return cast("Iterator[tuple[str, torch.Tensor]]", iter(self._tensors))


class Publisher:
    """Rank 0 sends the weights; the other ranks take part in gathering them."""

    def __init__(self, config: Config, engine: Engine, steering: Steering | None) -> None:
        self._config, self._engine, self._steering = config, engine, steering
        self._servers_engine = engine_of(config)
        self._sender = _sender(self._servers_engine, config) if steering else None

    def publish(self, servers: Sequence[str], version: int) -> dict[str, float]:
        """Send the weights to the servers and report which of them hold the version; a collective.

        Args:
            servers: URLs of the servers that are to be updated.
            version: Of the weights, which are the trainer's present ones.

        Returns:
            Rank 0's metrics sync_..., on all ranks.
        """
        source = PolicySource(self._engine)
        if self._steering is None or self._sender is None:
            for _ in source:
                pass
            return broadcast_object(None)
        addresses = [ServerAddress(url, url) for url in servers]
        report = update_servers(
            self._servers_engine,
            self._sender,
            addresses,
            source,
            version,
            key=self._steering.key,
            timeout_s=self._config.weight_sync.timeout_s,
        )
        metrics = {
            "sync_s": report.pause_s + report.transfer_s + report.resume_s,
            "sync_pause_s": report.pause_s,
            "sync_transfer_s": report.transfer_s,
            "sync_bytes": float(report.num_bytes),
        }
        logger.info(
            "version %d: held by %d servers; failed: %s; %.2f s",
            version,
            len(report.held),
            dict(report.failed),
            metrics["sync_s"],
        )
        self._steering.report(WeightsReport(version, report.held, dict(report.failed), metrics))
        return broadcast_object(metrics)

    def close(self) -> None:
        """Close the connections to the servers."""
        if self._sender is not None:
            self._sender.close()


def _sender(engine: InferenceEngine, config: Config) -> WeightSender:
    """Listens on this machine's address in the run: on a cluster the one that its agent found, else servers.host."""
    section, host = config.weight_sync, os.environ.get(ADDRESS_VARIABLE, config.servers.host)
    return engine.weight_sender(config.transport, host, bucket_bytes=section.bucket_mib << 20, timeout_s=section.timeout_s)
