"""`baton generate`: one completion, streamed to stdout."""

import sys
from collections.abc import Sequence
from typing import Any

from baton.cluster.completion import Asked, Completion, Interrupted, OnText, complete_remotely
from baton.cluster.features import refuse_missing_features
from baton.cluster.outcome import ExitCode, Output, exit_code_of
from baton.cluster.resolve import find_model, read_config
from baton.core.errors import ConflictingOptions, EmptyPrompt, InvalidSampling, InvalidText

DEFAULT_ADDRESS = "127.0.0.1:50051"


def read_prompt(prompt: str | None) -> str:
    """The prompt given, or standard input when it is `-`.

    Raises:
        EmptyPrompt: none was given, or standard input is closed.
        InvalidText: standard input is not UTF-8.
    """
    if prompt is None:
        raise EmptyPrompt("no prompt: give --prompt TEXT, or --prompt - to read standard input")
    if prompt != "-":
        return prompt
    if sys.stdin is None:  # the typing stubs say that it never is
        raise EmptyPrompt("no prompt: --prompt - reads standard input, which is closed")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"standard input is not valid UTF-8 at byte {error.start}"
        raise InvalidText(message, at=error.start) from error


def check_place(local: bool, address: str | None, local_options: dict[str, Any]) -> None:
    """Check that the options fit the place that answers.

    Raises:
        ConflictingOptions: --local with --address, or an option of --local without it.
    """
    if local and address is not None:
        raise ConflictingOptions("--local runs in this process and --address asks a deployment; give one of them")
    given = sorted(name for name, value in local_options.items() if value is not None)
    if given and not local:
        names = ", ".join(f"--{name}" for name in given)
        raise ConflictingOptions(f"{names}: a deployment has chosen these when it started; they go with --local")


def generate(
    output: Output, asked: Asked, *, local: bool, address: str | None, local_options: dict[str, Any]
) -> ExitCode:
    """Run one request in the place chosen and print it.

    Raises:
        BatonError: refused, or failed before the first token.
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


def given_ids(option: str, value: str | None) -> list[int]:
    """Token ids, written like `1,2,3`; none if there is no value.

    Raises:
        InvalidSampling: they are written otherwise.
    """
    try:
        return [int(part) for part in value.split(",")] if value is not None else []
    except ValueError as error:
        raise InvalidSampling(f"--{option}: token ids are written like 1,2,3", field=option) from error


def given_biases(values: Sequence[str] | None) -> list[tuple[int, float]]:
    """(token id, bias) of each value, which is written like `15=-2.5`.

    Raises:
        InvalidSampling: it is not.
    """
    try:
        return [(int(token), float(bias)) for token, _, bias in (value.partition("=") for value in values or ())]
    except ValueError as error:
        raise InvalidSampling("--logit-bias: a bias is written like 15=-2.5", field="logit_bias") from error


def _logprob_lines(completion: Completion) -> str:
    lines = []
    for report in completion.logprobs or ():
        top = " ".join(f"{token_id}:{logprob:.3f}" for token_id, logprob in report.top)
        lines.append(f"token {report.token_id}: logprob {report.logprob:.3f}, rank {report.rank}  {top}".rstrip())
    return "\n".join(lines)


def _complete_locally(asked: Asked, options: dict[str, Any], on_text: OnText) -> Completion:
    config = read_config(None, options)
    refuse_missing_features(config)
    find_model(config.model, config.weights)
    from baton.cluster.local import LocalCompleter  # imports torch

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
