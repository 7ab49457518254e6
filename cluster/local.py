"""Completions in this process: the one-process reference behind `baton generate --local`. It never imports ray."""

from baton.cluster.completion import Asked, Completion, Interrupted, OnText
from baton.cluster.features import refuse_missing_features
from baton.cluster.resolve import find_model, resolve_worker
from baton.core.clock import MonotonicClock
from baton.core.config import ServeConfig
from baton.core.errors import RequestCancelled, RequestDeadlineExceeded
from baton.core.request import AttemptKey, GenerationRequest
from baton.core.tokenizer import StopMatcher
from baton.engine.local import GenerationResult, LocalEngine
from baton.proto import wire
from baton.worker.loading import load_worker


class LocalCompleter:
    """A model loaded as a worker of the same configuration would load it, and one engine.

    Raises:
        StartupError: the configuration or the model directory is unusable.
    """

    def __init__(self, config: ServeConfig) -> None:
        refuse_missing_features(config)
        worker = resolve_worker(config, find_model(config.model, config.weights), worker_id="local")
        loaded = load_worker(worker)
        num_blocks = loaded.pool.num_blocks
        model, self._tokenizer = loaded.model, loaded.tokenizer
        del loaded  # its pool: the engine makes its own
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
        )

    def complete(self, asked: Asked, on_text: OnText) -> Completion:
        """Run one request; `on_text` gets the text as it comes.

        Raises:
            InvalidRequest: it can never be served.
            Interrupted: its deadline passed.
        """
        request = self._request(asked)
        text: list[str] = []
        token_ids: list[int] = []
        stream, matcher = self._tokenizer.stream(), StopMatcher(request.sampling.stop)

        def show(piece: str) -> None:
            text.append(piece)
            on_text(piece)

        result: GenerationResult | None = None
        try:
            for event in self._engine.run(request):
                token_ids.extend(event.token_ids)
                for token_id in event.token_ids:
                    show(matcher.push(stream.push(token_id)))
                result = event.result
        except (RequestDeadlineExceeded, RequestCancelled) as error:
            raise Interrupted(error, "".join(text), token_ids) from error
        assert result is not None
        assert result.finish_reason is not None
        show(matcher.push(stream.flush()))
        show(matcher.flush())
        counts = result.counts
        return Completion(
            text="".join(text),
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
        )

    def _request(self, asked: Asked) -> GenerationRequest:
        prompt = tuple(self._tokenizer.encode(asked.prompt))
        room_len = self._max_model_len - len(prompt)
        sampling = wire.sampling_from_client(asked.sampling(), room_len=room_len, draw_seed=asked.chosen_seed)
        self._num_requests += 1
        return GenerationRequest(
            key=AttemptKey(f"local-{self._num_requests}", 1),
            prompt_token_ids=prompt,
            sampling=sampling,
            deadline_s=self._clock.now_s() + asked.timeout_s,
            num_draft_tokens=self._num_draft_tokens,
        )
