"""Completions in this process, and the reference process that the demo compares with."""

import pytest

from baton.cluster.commands.completion import CompletionArguments, Interrupted
from baton.cluster.commands.local import LocalCompleter
from baton.cluster.commands.reference import ReferenceProcess
from baton.cluster.outcome import ExitCode, Output
from baton.core.config import ServeConfig
from baton.core.errors import EmptyPrompt, InvalidSampling, PromptTooLong, RequestDeadlineExceeded

CONFIG = {"dtype": "float32", "batch_invariant": True, "device": "cpu", "kv_memory_mib": 16}


@pytest.fixture(scope="module")
def completer():
    return LocalCompleter(ServeConfig.from_mapping(CONFIG))


def test_text_is_the_text_of_the_tokens_and_is_streamed(completer):
    shown = []
    completion = completer.complete(CompletionArguments(prompt="def f(x):\n", max_tokens=24), shown.append)
    assert "".join(shown) == completion.text
    assert len([piece for piece in shown if piece]) > 1
    assert (len(completion.token_ids), completion.finish_reason) == (24, "length")
    assert 0 < completion.num_accepted_tokens <= completion.num_draft_tokens
    assert completion.num_decode_tokens == 23


def test_a_stop_string_ends_before_itself(completer):
    whole = completer.complete(CompletionArguments(prompt="def f(x):\n", max_tokens=24), lambda text: None)
    stop = whole.text[10:14]
    cut = completer.complete(CompletionArguments(prompt="def f(x):\n", max_tokens=24, stop=(stop,)), lambda text: None)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"


def test_equal_seeds_give_equal_tokens(completer):
    asked = CompletionArguments(prompt="import", max_tokens=8, temperature=1.0, seed=3)
    first, second = (completer.complete(asked, lambda text: None) for _ in range(2))
    assert first.token_ids == second.token_ids
    assert (
        completer.complete(CompletionArguments(prompt="x", max_tokens=1, temperature=1.0), lambda text: None).seed > 0
    )


def test_several_answers_and_log_probabilities(completer):
    more = {"n": 2, "logprobs": 1, "prompt_logprobs": 0, "presence_penalty": 1.0, "logit_bias": [[5, 1.0]]}
    shown = []
    completion = completer.complete(
        CompletionArguments(prompt="import", max_tokens=6, temperature=1.0, seed=3, more=more), shown.append
    )
    assert "".join(shown) == completion.text
    [other] = completion.others
    assert other.token_ids != completion.token_ids
    for answer in (completion, other):
        assert [report.token_id for report in answer.logprobs] == list(answer.token_ids)
    assert len(completion.prompt_logprobs) == completion.prompt_len - 1
    assert len(completion.as_data()["choices"]) == 2


def test_no_stop_string_before_min_tokens(completer):
    whole = completer.complete(CompletionArguments(prompt="def f(x):\n", max_tokens=24), lambda text: None)
    stop = whole.text[4:6]
    asked = CompletionArguments(prompt="def f(x):\n", max_tokens=24, stop=(stop,), more={"min_tokens": 12})
    completion = completer.complete(asked, lambda text: None)
    assert len(completion.token_ids) >= 12
    assert completion.text.startswith(whole.text[:8])


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (CompletionArguments(prompt=""), EmptyPrompt),
        (CompletionArguments(prompt="x", temperature=-1), InvalidSampling),
        (CompletionArguments(prompt="x", max_tokens=100_000), PromptTooLong),
        (CompletionArguments(prompt="x", more={"n": 2**31 - 1}), InvalidSampling),
        (CompletionArguments(prompt="x", more={"n": -1}), InvalidSampling),
        (CompletionArguments(prompt="x", more={"min_p": 1.5}), InvalidSampling),
        (CompletionArguments(prompt="x", more={"allowed_token_ids": []}), InvalidSampling),
    ],
)
def test_what_cannot_be_served_is_refused(completer, asked, error):
    with pytest.raises(error):
        completer.complete(asked, lambda text: None)


def test_running_out_of_time_keeps_what_was_made(completer):
    with pytest.raises(Interrupted) as late:
        completer.complete(CompletionArguments(prompt="x", timeout_s=1e-6), lambda text: None)
    assert isinstance(late.value.error, RequestDeadlineExceeded)


def test_generate_reports_a_timeout_as_one(monkeypatch, capsys):
    from baton.cluster.commands import generate

    error = Interrupted(RequestDeadlineExceeded("the deadline passed"), "some", [1])

    def interrupted(*_):
        raise error

    monkeypatch.setattr(generate, "_complete_locally", interrupted)
    asked = CompletionArguments(prompt="x")
    assert generate.generate(Output(True), asked, local=True, address=None, local_options={}) is ExitCode.TIMEOUT
    assert '"text": "some"' in capsys.readouterr().out


def test_the_reference_process_gives_the_same_tokens(completer):
    asked = [
        CompletionArguments(prompt="def f(x):\n", max_tokens=6),
        CompletionArguments(prompt="import", max_tokens=3, temperature=0.7, seed=1),
    ]
    reference = ReferenceProcess(ServeConfig.from_mapping(CONFIG), asked)
    here = [completer.complete(one, lambda text: None) for one in asked]
    assert [list(one.token_ids) for one in here] == [one["token_ids"] for one in reference.completions(60)]


def test_auto_gives_the_same_tokens(completer):
    asked = CompletionArguments(prompt="def f(x):\n", max_tokens=20)
    auto = LocalCompleter(ServeConfig.from_mapping(CONFIG | {"num_speculative_tokens": "auto"}))
    assert auto.complete(asked, lambda text: None).token_ids == completer.complete(asked, lambda text: None).token_ids
