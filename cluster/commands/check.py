"""`baton check`: says what a model directory would run as, or every reason why it cannot."""

from typing import Any

from baton.cluster.checkpoint import Judgement, judge
from baton.cluster.outcome import ExitCode, Output, exit_code_of, next_step
from baton.core.config import ServeConfig


def check(config: ServeConfig, output: Output) -> ExitCode:
    """Print the result; 0 if the model can be served."""
    found = judge(config)
    data = _data(found)
    if not found.errors:
        output.emit(data, _text(found))
        return ExitCode.OK
    code = exit_code_of(found.errors[0])
    for error in found.errors:
        output.note(f"baton: {type(error).__name__}: {error.message}\nnext: {next_step(error)}", "ERROR")
    output.emit(data | {"exit_code": code})
    return code


def _data(found: Judgement) -> dict[str, Any]:
    errors = [{"error": type(error).__name__, "message": error.message} for error in found.errors]
    return {"ok": not errors, "model": found.model, **found.facts, "notes": found.notes, "errors": errors}


def _text(found: Judgement) -> str:
    facts = found.facts
    drafts = facts["num_speculative_tokens"]
    lines = [
        f"{found.model} can be served: {facts['architecture']}, {facts['num_parameters'] / 1e9:.2f}B parameters",
        f"name: {', '.join(facts['names'])}",
        f"runs in {facts['dtype']} on {facts['device']}, up to {facts['max_model_len']} positions, "
        + (f"{drafts} draft tokens a step by the {facts['drafter']}" if drafts else "without drafts"),
        *([f"weights: {facts['weights']}"] if facts["weights"] else []),
        f"memory of each worker: weights {facts['weight_gib']:.2f} GiB{_ranks(facts)}, "
        f"KV {facts['kv_bytes_per_token'] / 1024:.1f} KiB a token{_pool(facts)}" + _state(facts),
    ]
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def _pool(facts: dict[str, Any]) -> str:
    """Number of tokens that fit in memory; on a GPU, where that is unknown, what the longest sequence takes."""
    if facts["kv_tokens"] is not None:
        return f", for {facts['kv_tokens']} tokens"
    num_bytes = facts["kv_bytes_per_token"] * facts["max_model_len"]
    return f", {num_bytes / (1 << 30):.2f} GiB for a sequence of {facts['max_model_len']}"


def _state(facts: dict[str, Any]) -> str:
    """Recurrent state of sequences beside KV, and the number of cached prefixes with a copy of it, where known."""
    if not facts["state_bytes_per_sequence"]:
        return ""
    of_prefixes = f", and of {facts['state_checkpoints']} cached prefixes" if facts["state_checkpoints"] else ""
    interval = facts["state_checkpoint_interval"]
    of_prefixes += f", of which a prompt leaves one every {interval} tokens" if interval else ""
    return f", state {facts['state_bytes_per_sequence'] / (1 << 20):.2f} MiB a sequence{of_prefixes}"


def _ranks(facts: dict[str, Any]) -> str:
    sizes = {facts["tp_prefill"], facts["tp_decode"]}
    held = ", each with whole experts" if facts["expert_parallel"] else ""
    num_copies = facts["num_redundant_experts"]
    if num_copies is not None:
        held += " that move by load" + (f", {num_copies} copies among them" if num_copies else "")
    held += ", those of decode workers with the KV of their own sequences" if facts["dp_attention"] else ""
    return "" if sizes == {1} else f" over {' or '.join(map(str, sorted(sizes)))} ranks{held}"
