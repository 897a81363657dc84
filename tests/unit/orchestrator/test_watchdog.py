"""A stall becomes a message that names who waits for whom."""

from megatron_rl.config import Config
from megatron_rl.orchestrator.fleet import Server
from megatron_rl.orchestrator.state import RunState
from megatron_rl.orchestrator.watchdog import Watchdog
from megatron_rl.wire.control import Order, OrderRequest, WorkRequest

SECTIONS = {"run": {"name": "t", "steps": 6}, "model": {"path": "/m"}, "task": {"name": "t"}, "rollouts": {"prompts_per_step": 3}}


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def stalled():
    clock = Clock()
    watchdog, state = Watchdog(60.0, clock), RunState.new(Config.model_validate(SECTIONS))
    servers = [Server(0, "ready", "http://s0", 4), Server(1, "starting")]
    return clock, watchdog, lambda: watchdog.stall(4, state, servers), state


def test_silence_is_no_stall_before_its_time_and_is_reported_again_later():
    clock, watchdog, stall, _ = stalled()
    assert stall() is None
    clock.now += 61
    assert stall().startswith("no group and no step has been finished for 61 s:")
    assert stall() is None
    clock.now += 61
    assert "for 122 s" in stall()
    watchdog.record_progress()
    clock.now += 59
    assert stall() is None


def test_it_names_who_waits_for_whom():
    clock, watchdog, stall, state = stalled()
    watchdog.record_message("/work", WorkRequest("node7-12", slots=1))
    watchdog.record_message("/order", OrderRequest(4))
    state.begin("http://s0", 4)
    clock.now += 30
    watchdog.record_answer("/order", Order("wait"))
    watchdog.record_message("/order", OrderRequest(4))
    clock.now += 40
    message = stall()
    assert (
        "the trainer, at step 4, waits for an order, for 70 s; for its next batch 0 groups of the 3 that a step takes are "
        "finished, 1 in flight" in message
    )
    assert "worker node7-12 sent its last message 70 s ago" in message
    assert "server 0 at http://s0 is ready, holds version 4, samples 1 group" in message
    assert "server 1 at (starting) is starting, holds no known version" in message


def test_a_trainer_that_does_not_come_back_from_an_order_is_named():
    clock, watchdog, stall, _ = stalled()
    watchdog.record_message("/order", OrderRequest(4))
    clock.now += 5
    watchdog.record_answer("/order", Order("train", "plans/step_000004.json"))
    clock.now += 65
    assert "carries out the order 'train' (its ranks: logs/trainer-*.log), for 65 s" in stall()
