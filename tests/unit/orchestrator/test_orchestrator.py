"""The asynchronous loop against workers and a trainer made of a few lines each: order of events, bounds, servers that fail."""

import asyncio

import httpx
import pytest

from megatron_rl.orchestrator import RunFailedError
from megatron_rl.orchestrator.fleet import host_of
from megatron_rl.orchestrator.probes import Probe
from megatron_rl.records import GroupResult
from megatron_rl.wire.control import (
    Ack,
    GroupReport,
    ProbeReport,
    StepReport,
    WeightsReport,
    WorkOrder,
    WorkRequest,
    encode,
)
from tests.unit.orchestrator.fake_run import FakeRun, config, sampled


def test_every_step_is_trained_once_within_the_bound_and_the_ledger_adds_up(tmp_path):
    fake = FakeRun(tmp_path, config(tmp_path))
    asyncio.run(fake.run(lambda task: sampled(fake, task)))
    assert fake.observer.steps == list(range(6))
    assert sorted(set(fake.versions)) == list(range(6))
    trained = [e.prompt_index for plan in fake.consumed for e in plan.entries]
    assert len(trained) == 6 * 3 * 2 and len(set(trained)) == 6 * 3
    assert max(b["staleness_max"] for b in fake.observer.batches) <= 1
    fake.orchestrator.context.state.ledger.check()
    assert [step for step, _ in fake.folder.complete_checkpoints()] == [4, 6]


def test_generation_runs_ahead_but_no_further_than_the_bound(tmp_path):
    fake = FakeRun(tmp_path, config(tmp_path, max_staleness=1), num_servers=1)
    begun = []

    async def scenario():
        fleet = asyncio.create_task(fake.orchestrator.context.fleet.run())
        while not fake.orchestrator.context.fleet.to_sync(0):
            await asyncio.sleep(0.01)
        await fake.post("/weights", WeightsReport(0, (fake.servers[0].url,)), Ack)
        fake.orchestrator.context.probe = None
        while tasks := (await fake.post("/work", WorkRequest("w", slots=4, wait_s=0.05), WorkOrder)).tasks:
            begun.extend(tasks)
        fleet.cancel()

    asyncio.run(scenario())
    assert len(begun) == 2 * 3  # steps 0 and 1 may consume what version 0 samples


def test_a_worker_gets_the_servers_on_its_host_and_those_on_hosts_without_one(tmp_path):
    fake = FakeRun(tmp_path, config(tmp_path, max_staleness=2), num_servers=3)  # at s0, s1, s2

    async def scenario():
        fleet = asyncio.create_task(fake.orchestrator.context.fleet.run())
        while len(fake.orchestrator.context.fleet.to_sync(0)) < 3:
            await asyncio.sleep(0.01)
        await fake.post("/weights", WeightsReport(0, tuple(s.url for s in fake.servers)), Ack)
        assigned = {}
        for slot in (0, 1, 0, 1):
            host = host_of(fake.orchestrator.context.fleet.servers[slot].url)
            order = await fake.post("/work", WorkRequest(host, slots=2, wait_s=0.05, host=host), WorkOrder)
            assigned.setdefault(slot, []).append({(task.probe, task.server[:9]) for task in order.tasks})
        fleet.cancel()
        return assigned

    assigned = asyncio.run(scenario())
    # The first comes before it is known that s1 has a worker. The probes' four prompts are assigned to s0, s1, s2, s0.
    assert assigned[0] == [{(True, "http://s0"), (True, "http://s1")}, {(True, "http://s0"), (False, "http://s0")}]
    assert assigned[1] == [{(True, "http://s2"), (False, "http://s1")}, {(False, "http://s1"), (False, "http://s2")}]


def test_failed_groups_are_sampled_again_and_given_up_after_max_attempts(tmp_path):
    fake = FakeRun(tmp_path, config(tmp_path, max_attempts=2))

    def sample(task):
        if task.prompt_index % 5 == 0 and not task.probe:
            return GroupResult(
                task.uid, task.prompt_index, task.attempt, task.server, failure="contract", message="a repeated expert"
            )
        return sampled(fake, task)

    asyncio.run(fake.run(sample))
    ledger = fake.orchestrator.context.state.ledger
    ledger.check()
    assert fake.observer.steps == list(range(6))
    assert ledger.dropped["contract"] >= 3 and ledger.outcome(0) == "dropped: contract"
    assert ledger.discarded["contract"] >= 2 * ledger.dropped["contract"]
    assert any("a repeated expert" in event for event in fake.observer.events)


def test_a_run_whose_groups_all_fail_ends_with_the_reason(tmp_path):
    fake = FakeRun(tmp_path, config(tmp_path))

    def sample(task):
        if task.probe:
            return sampled(fake, task)
        return GroupResult(
            task.uid, task.prompt_index, task.attempt, task.server, failure="reward", message="ZeroDivisionError in my_reward"
        )

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(fake.run(sample))
    failed = [e for e in caught.value.exceptions if isinstance(e, RunFailedError)]
    assert "ZeroDivisionError in my_reward" in str(failed[0])


def test_a_server_that_dies_loses_its_groups_to_the_others(tmp_path):
    fake = FakeRun(tmp_path, config(tmp_path))
    died = []

    def sample(task):
        if not died and not task.probe and task.prompt_index > 4:
            died.append(task.server)
            next(s for s in fake.servers if s.url == task.server).code = -9
        if task.server in died:
            return GroupResult(
                task.uid, task.prompt_index, task.attempt, task.server, failure="server", message="connection refused"
            )
        return sampled(fake, task)

    asyncio.run(fake.run(sample))
    fake.orchestrator.context.state.ledger.check()
    assert fake.observer.steps == list(range(6)) and len(fake.servers) == 3
    assert not fake.orchestrator.context.state.ledger.dropped
    assert any("exit code -9" in event for event in fake.observer.events)


def test_servers_join_and_leave_while_the_run_continues_and_nothing_is_counted_twice(tmp_path):
    fake = FakeRun(tmp_path, config(tmp_path), num_servers=1)
    sampled_by = []

    def sample(task):
        fleet = fake.orchestrator.context.fleet
        if not task.probe and task.prompt_index == 4 and len(fleet.servers) == 1:
            fleet.add()
        if fleet.servers[-1].state == "ready" and len(fleet.servers) == 2 and not fleet.servers[0].unwanted:
            fleet.remove(0)  # in the middle of its own group, or of the other's
        sampled_by.append(task.server)
        return sampled(fake, task)

    asyncio.run(fake.run(sample))
    assert fake.observer.steps == list(range(6))
    ledger = fake.orchestrator.context.state.ledger
    ledger.check()
    assert ledger.trained_prompts == 6 * 3 and not ledger.dropped
    assert {"http://s0.0", "http://s1.1"} == set(sampled_by) and sampled_by[-1] == "http://s1.1"
    assert any("http://s0.0 left: removed from the fleet" in event for event in fake.observer.events)


def test_a_server_whose_probe_is_off_leaves_the_fleet(tmp_path):
    fake = FakeRun(tmp_path, config(tmp_path), num_servers=1)
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(fake.run(lambda task: sampled(fake, task), abs_dlogp=0.5))
    failed = [e for e in caught.value.exceptions if isinstance(e, RunFailedError)]
    assert "no rollout server is left" in str(failed[0])
    assert any("is off by 0.5" in event for event in fake.observer.events)


def test_what_a_server_that_fails_its_probe_has_sampled_is_not_trained(tmp_path):
    """Server 0 passes its first probe and fails the second: of its finished groups those that version 0 sampled stay."""
    fake = FakeRun(tmp_path, config(tmp_path, max_staleness=2))
    o = fake.orchestrator
    for server in o.context.fleet.servers:
        server.url, server.state, server.version = f"http://s{server.slot}", "ready", 0
    urls = [server.url for server in o.context.fleet.servers]

    def finish(url, version):
        task = o.context.state.begin(url, version)
        o.context.fleet.servers[urls.index(url)].version = version
        o.context.state.end(sampled(fake, task))
        return task.prompt_index

    async def probe(version, off):
        await o.verification.on_weights(WeightsReport(version, tuple(urls)))
        scores = {}
        while task := o.context.probe.take(lambda url: True):
            result = sampled(fake, task)
            scores |= {rollout.uid: 0.5 if task.server == off else 0.0 for rollout in result.rollouts}
            await o.workers.on_group(GroupReport("w", result))
        await o.verification.on_probed(ProbeReport(version, scores))

    async def scenario():
        await probe(0, off=None)
        kept = [finish(urls[0], 0), finish(urls[1], 0)]
        lost, also_kept = finish(urls[0], 1), finish(urls[1], 1)
        late = o.context.state.begin(urls[0], 1)
        await probe(1, off=urls[0])
        await o.workers.on_group(GroupReport("w", sampled(fake, late)))  # of a server that is quarantined by now
        stages = {index: o.context.state.ledger.outcome(index) for index in (*kept, lost, also_kept, late.prompt_index)}
        assert [stages[index] for index in (*kept, also_kept)] == ["buffered"] * 3
        assert stages[lost] == stages[late.prompt_index] == "waiting"

    asyncio.run(scenario())
    assert o.context.state.ledger.discarded == {"unverified": 1, "interrupted": 1} and not o.context.state.ledger.dropped
    assert any("1 finished group from this server will be sampled again" in event for event in fake.observer.events)


def test_a_server_none_of_whose_probes_can_be_scored_leaves_the_fleet(tmp_path):
    """NaN weights give answers that break the contract, and no log-prob that could be off."""
    fake = FakeRun(tmp_path, config(tmp_path), num_servers=2)

    def sample(task):
        if task.probe and task.server.startswith("http://s0"):
            return GroupResult(task.uid, task.prompt_index, 0, task.server, failure="contract", message="log-probs are NaN")
        return sampled(fake, task)

    asyncio.run(fake.run(sample))
    assert any("could not be scored: log-probs are NaN" in event for event in fake.observer.events)
    server = fake.orchestrator.context.fleet.servers[0]
    assert server.quarantined or server.restarts  # how far it has got by the end of the run depends on the clock
    assert fake.observer.steps == list(range(6))


def test_a_probe_evaluates_servers_that_answer_wrongly_and_those_that_do_not_answer(tmp_path):
    fake = FakeRun(tmp_path, config(tmp_path), num_servers=3)
    probe = Probe.on(["http://s0", "http://s1", "http://s2"], 4, 3)
    scores = {}
    while task := probe.take(lambda url: True):
        result = sampled(fake, task)
        scores |= {rollout.uid: 0.5 if task.server == "http://s1" else 0.0 for rollout in result.rollouts}
        silent = GroupResult(task.uid, task.prompt_index, 0, task.server, failure="contract", message="NaN")
        probe.end(silent if task.server == "http://s2" else result)
    failed = probe.evaluate(scores, 0.1)
    assert sorted(failed) == ["http://s1", "http://s2"]
    assert "is off by 0.5" in failed["http://s1"] and "could not be scored: NaN" in failed["http://s2"]


def test_a_trainer_that_dies_ends_the_run_with_its_log(tmp_path):
    fake = FakeRun(tmp_path, config(tmp_path))

    async def scenario():
        fake.trainer.status = 1
        await fake.orchestrator.run([fake.trainer], fake.start_trainer)

    with pytest.raises(RunFailedError, match="trainer-0 ended with status 1"):
        asyncio.run(scenario())


def test_requests_without_the_key_are_refused(tmp_path):
    fake = FakeRun(tmp_path, config(tmp_path))

    async def scenario():
        bare = httpx.AsyncClient(transport=httpx.ASGITransport(fake.http._transport.app), base_url="http://o")
        posted = await bare.post("/step", content=encode(StepReport(0, {})))
        asked = await bare.get("/status")
        wrong = await fake.http.post("/step", content=b'{"step": "x"}')
        return posted.status_code, asked.status_code, wrong.status_code

    assert asyncio.run(scenario()) == (401, 401, 400)


def test_a_report_that_is_sent_again_counts_once(tmp_path):
    """The answer to the first one was lost on the way."""
    fake = FakeRun(tmp_path, config(tmp_path))
    once = fake.post

    async def twice(route, message, answer):
        first = await once(route, message, answer)
        return await once(route, message, answer) if route in ("/step", "/saved", "/groups") else first

    fake.post = twice
    asyncio.run(fake.run(lambda task: sampled(fake, task)))
    assert fake.observer.steps == list(range(6))
    fake.orchestrator.context.state.ledger.check()
    assert fake.orchestrator.context.state.ledger.trained_prompts == 6 * 3
