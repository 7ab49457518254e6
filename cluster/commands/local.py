"""Completions in this process: the one-process reference behind `baton generate --local`. Never imports ray."""

from collections.abc import Sequence
from dataclasses import replace

from baton.cluster.commands.completion import Completion, CompletionArguments, Interrupted, OnText
from baton.cluster.resolve import find_model, resolve_worker
from baton.core.clock import MonotonicClock
from baton.core.config import ServeConfig
from baton.core.errors import RequestCancelled, RequestDeadlineExceeded
from baton.core.requests.answer_text import AnswerText
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import MAX_CHOICES, SamplingParams
from baton.core.requests.tokenizer import Tokenizer
from baton.engine.generation import GenerationResult
from baton.engine.local import LocalEngine
from baton.proto import wire
from baton.worker.loading import load_worker


class LocalCompleter:
    """One engine, with a model that is loaded as a worker of the same configuration would load it.

    Raises:
        StartupError: the configuration or the model directory is unusable.
    """

    def __init__(self, config: ServeConfig) -> None:
        worker = resolve_worker(config, find_model(config.model, is_dummy=config.is_dummy), worker_id="local")
        loaded = load_worker(worker)
        worker = loaded.applied(worker)
        num_blocks = loaded.pool.num_blocks
        model, self._tokenizer = loaded.model, loaded.tokenizer
        del loaded  # frees its pool, because the engine makes its own
        self._num_draft_tokens = worker.num_draft_tokens
        self._max_model_len = worker.max_model_len
        self._num_requests = 0
        self._clock = MonotonicClock()
        self._engine = LocalEngine(
            model,
            self._tokenizer,
            num_blocks=num_blocks,
            block_size=worker.block_size,
            num_draft_tokens=worker.num_draft_tokens,
            chunk_len=worker.chunk_len,
            max_num_sequences=worker.max_num_seqs,
            clock=self._clock,
            scheduling=worker.scheduling,
            verification=worker.verification,
            lookup=worker.lookup,
            overcommit=worker.overcommit,
            host_kv_bytes=worker.host_kv_bytes,
            auto_drafts=worker.auto_drafts,
            chooses_method=worker.auto_method,
        )

    def complete(self, asked: CompletionArguments, on_text: OnText) -> Completion:
        """Run one request; `on_text` is called with pieces of the (first) answer's text.

        Raises:
            InvalidRequest: the request can never be served.
            Interrupted: its deadline passed.
        """
        request = self._request(asked)
        num_answers = min(max(request.sampling.n, 1), MAX_CHOICES)  # others are refused below
        answers = [_Answer(self._tokenizer, request.sampling) for _ in range(num_answers)]
        first = answers[0]
        results: dict[int, GenerationResult] = {}
        try:
            for event in self._engine.run(request):
                text = answers[event.choice].push(event.token_ids)
                if event.result is not None:
                    results[event.choice] = event.result
                    text += answers[event.choice].finish()
                if event.choice == 0:
                    on_text(text)
        except (RequestDeadlineExceeded, RequestCancelled) as error:
            raise Interrupted(error, first.text, first.token_ids) from error
        completion, *others = [_completion(request, results[at], answer.text) for at, answer in enumerate(answers)]
        return replace(completion, others=tuple(others))

    def _request(self, asked: CompletionArguments) -> GenerationRequest:
        prompt = tuple(self._tokenizer.encode(asked.prompt, add_special_tokens=True))
        room_len = self._max_model_len - len(prompt)
        sampling = wire.sampling_from_client(asked.sampling(), room_len=room_len, draw_seed=asked.chosen_seed)
        self._num_requests += 1
        return GenerationRequest(
            key=AttemptKey(f"local-{self._num_requests}", 1),
            prompt_token_ids=prompt,
            sampling=sampling,
            deadline_s=self._clock.now_s() + asked.timeout_s,
            num_draft_tokens=self._num_draft_tokens,
            keeps_drafts=asked.sampling().HasField("seed"),
        )


class _Answer:
    """One answer's tokens, and the part of their text that is final."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self._text = AnswerText(tokenizer, sampling)

    def push(self, token_ids: Sequence[int]) -> str:
        """Return text that became final with these tokens."""
        self.token_ids += token_ids
        return self._add(self._text.push(token_ids))

    def finish(self) -> str:
        """Return what was still withheld at the end."""
        return self._add(self._text.finish())

    def _add(self, text: str) -> str:
        self.text += text
        return text


def _completion(request: GenerationRequest, result: GenerationResult, text: str) -> Completion:
    assert result.finish_reason is not None
    counts = result.counts
    return Completion(
        text=text,
        token_ids=result.token_ids,
        finish_reason=result.finish_reason.value,
        prompt_len=request.prompt_len,
        seed=request.sampling.seed,
        ttft_ms=1e3 * (result.ttft_s or 0.0),
        tpot_ms=1e3 * (result.tpot_s or 0.0),
        num_verify_steps=counts.num_verify_steps,
        num_draft_tokens=counts.num_draft_tokens,
        num_accepted_tokens=counts.num_accepted_tokens,
        num_decode_tokens=len(result.token_ids) - 1,
        logprobs=result.logprobs,
        prompt_logprobs=result.prompt_logprobs,
    )
