"""What the policy of a run reads and how its answers end, found out before the run starts."""

from pathlib import Path

from megatron_rl.config import Config
from megatron_rl.tasks import TextEncoder, load_task

_SHOWN_CHARACTERS = 2000
_SHOWN_IDS = 64


def describe_text(folder: Path, config: Config) -> dict[str, object]:
    """Render and encode the first prompt, so that a template that fails does so now.

    Args:
        folder: The model folder.
        config: The run's.

    Returns:
        Lines for the log: `first_prompt`, and `end_of_turn` where no token that ends a turn ends a rollout.

    Raises:
        TaskError: The chat template fails, or a prompt cannot be encoded.
    """
    text, rollouts = TextEncoder(folder, config.task), config.rollouts
    prompt = load_task(config.task, config.run.seed).prompt(0)
    ids, shown = text.prompt(prompt), text.prompt_text(prompt)
    cut = "" if len(shown) <= _SHOWN_CHARACTERS else f"... ({len(shown)} characters)"
    more = "" if len(ids) <= _SHOWN_IDS else ", ..."
    listed = ", ".join(map(str, ids[:_SHOWN_IDS]))
    lines: dict[str, object] = {
        "first_prompt": f"first prompt: {shown[:_SHOWN_CHARACTERS]!r}{cut}, {len(ids)} tokens: [{listed}{more}]"
    }
    stops = {*text.eos_ids, *text.stop_ids(rollouts.stop_tokens)}
    end = text.end_of_turn_id
    if end not in stops and not (rollouts.stop or rollouts.stop_at_newline):
        lines["end_of_turn"] = (
            f"the chat template closes a turn with {text.whole_text([end])!r} ({end}), which is not among the tokens that end a "
            f"rollout ({', '.join(map(str, sorted(stops)))}): rollouts of a policy that learned this template run to "
            f"rollouts.max_new_tokens = {rollouts.max_new_tokens}; set rollouts.stop_tokens = [{end}], or correct eos_token_id "
            "in generation_config.json"
        )
    return lines
