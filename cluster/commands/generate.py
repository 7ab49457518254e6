"""`baton generate`: one completion, streamed to stdout."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.cluster.checkpoint import require_servable
from baton.cluster.commands.completion import Completion, CompletionArguments, Interrupted, OnText, complete_remotely
from baton.cluster.outcome import ExitCode, Output, exit_code_of
from baton.cluster.resolve import read_config
from baton.core.errors import ConflictingOptions, EmptyPrompt, InvalidGrammar, InvalidSampling, InvalidText
from baton.core.requests.answer_structure import JSON_OBJECT
from baton.core.requests.sampling import SCALAR_FIELDS, GrammarSpec


def read_grammar(
    *, json_schema: Path | None, regex: str | None, grammar: Path | None, json_object: bool
) -> GrammarSpec | None:
    """Return the grammar that the options prescribe for the answer, if any does.

    Raises:
        ConflictingOptions: more than one does.
        InvalidGrammar: a file cannot be read, or is not UTF-8.
    """
    given = {"json_schema": json_schema, "regex": regex, "grammar": grammar, JSON_OBJECT: json_object or None}
    given = {kind: value for kind, value in given.items() if value is not None}
    if len(given) > 1:
        names = ", ".join(f"--{kind.replace('_', '-')}" for kind in given)
        raise ConflictingOptions(f"{names}: an answer has one form; give one of them")
    for kind, value in given.items():
        if not isinstance(value, Path):
            return GrammarSpec(kind, value if isinstance(value, str) else "")
        try:
            return GrammarSpec(kind, value.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidGrammar(f"--{kind.replace('_', '-')}: cannot read {value}: {error}", kind=kind) from error
    return None


DEFAULT_ADDRESS = "127.0.0.1:50051"


def read_prompt(prompt: str | None) -> str:
    """Return the prompt given, or standard input if it is `-`.

    Raises:
        EmptyPrompt: none was given, or standard input is closed.
        InvalidText: standard input is not UTF-8.
    """
    if prompt is None:
        raise EmptyPrompt("no prompt: give --prompt TEXT, or --prompt - to read standard input")
    if prompt != "-":
        return prompt
    if sys.stdin is None:  # which the typing stubs deny
        raise EmptyPrompt("no prompt: --prompt - reads standard input, which is closed")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"standard input is not valid UTF-8 at byte {error.start}"
        raise InvalidText(message, at=error.start) from error


def check_place(local: bool, address: str | None, local_options: dict[str, Any]) -> None:
    """Check that the options fit where the request runs.

    Raises:
        ConflictingOptions: --local with --address, or an option of --local without it.
    """
    if local and address is not None:
        raise ConflictingOptions("--local runs in this process and --address asks a deployment; give one of them")
    given = sorted(name for name, value in local_options.items() if value is not None)
    if given and not local:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConflictingOptions(f"{names}: a deployment has chosen these when it started; they go with --local")


def generate(
    output: Output, asked: CompletionArguments, *, local: bool, address: str | None, local_options: dict[str, Any]
) -> ExitCode:
    """Run one request locally or at a deployment, and print the answer.

    Raises:
        BatonError: the request was refused, or failed before the first token.
    """
    try:
        if local:
            completion = _complete_locally(asked, local_options, output.write)
        else:
            completion = complete_remotely(address or DEFAULT_ADDRESS, asked, output.write)
    except Interrupted as interrupted:
        return _report_interrupted(output, interrupted)
    output.write("\n")
    for at, other in enumerate(completion.others, start=1):
        output.write(f"--- answer {at}\n{other.text}\n")
    if completion.logprobs is not None and not output.as_json:
        output.note(_logprob_lines(completion))
    output.emit(completion.as_data())
    return ExitCode.OK


def more_sampling(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SamplingParams that these flags set; flags that were not given are absent.

    Raises:
        InvalidSampling: a flag with several numbers is not written as its help says.
    """
    given: dict[str, Any] = {
        name: flags.get(name) for name in SCALAR_FIELDS if name not in CompletionArguments.__dataclass_fields__
    }
    for name in ("stop_token_ids", "allowed_token_ids"):
        given[name] = None if flags[name] is None else _ids(name, flags[name])
    given["bad_words"] = [_ids("bad_words", word) for word in flags["bad_words"] or ()] or None
    given["logit_bias"] = [_bias(value) for value in flags["logit_bias"] or ()] or None
    return {name: value for name, value in given.items() if value is not None}


def _ids(name: str, value: str) -> list[int]:
    try:
        return [int(part) for part in value.split(",")]
    except ValueError as error:
        flag = name.replace("_", "-")
        raise InvalidSampling(f"--{flag} {value[:80]!r}: token ids are written like 1,2,3", field=name) from error


def _bias(value: str) -> tuple[int, float]:
    token, _, bias = value.partition("=")
    try:
        return int(token), float(bias)
    except ValueError as error:
        message = f"--logit-bias {value[:80]!r}: a bias is written like 15=-2.5"
        raise InvalidSampling(message, field="logit_bias") from error


def _logprob_lines(completion: Completion) -> str:
    lines = []
    for report in completion.logprobs or ():
        top = " ".join(f"{token_id}:{logprob:.3f}" for token_id, logprob in report.top)
        lines.append(f"token {report.token_id}: logprob {report.logprob:.3f}, rank {report.rank}  {top}".rstrip())
    return "\n".join(lines)


def _complete_locally(asked: CompletionArguments, options: dict[str, Any], on_text: OnText) -> Completion:
    config = read_config(None, options)
    require_servable(config)
    from baton.cluster.commands.local import LocalCompleter  # imports torch

    return LocalCompleter(config).complete(asked, on_text)


def _report_interrupted(output: Output, interrupted: Interrupted) -> ExitCode:
    output.write("\n")
    error = interrupted.error
    code = exit_code_of(error)
    code = code if code is ExitCode.TIMEOUT else ExitCode.PARTIAL
    if output.as_json:
        data = {"text": interrupted.text, "token_ids": interrupted.token_ids, "finish_reason": "error"}
        output.emit(data | {"error": type(error).__name__, "message": error.message, "exit_code": code})
    return output.fail(error, code)
