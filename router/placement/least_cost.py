"""Policies that send a request where it costs least, by load alone or by load and cached prefixes. Pure.

The random source only decides between pairs of equal cost.
"""

import dataclasses
import random
from collections.abc import Sequence, Set
from typing import Final, NamedTuple

from baton.core.block_hash import block_hashes, checkpoint_blocks, checkpoint_name
from baton.core.clock import Clock
from baton.core.errors import WorkersIncompatible
from baton.core.requests.request import GenerationRequest
from baton.router.placement.cost import (
    WEIGHTS,
    CostWeights,
    Loads,
    Pace,
    PrefillCost,
    RequestNeeds,
    SentRequest,
    WorkerLoad,
    decode_cost,
    edge_cost,
    local_cost,
    prefill_cost,
    split_cost,
)
from baton.router.placement.local_prefill import LOCAL, SPLIT, LocalPrefill
from baton.router.placement.members import DECODE, PREFILL, Incarnation, Member
from baton.router.placement.policy import NOBODY, Incarnations, Pair, RoundRobin, require
from baton.router.placement.prefix_index import FleetPrefixIndex

TIE_S: Final = 1e-6
MAX_PAIRS: Final = 256  # about 4 us each; with more pairs, only the cheapest workers of each role are paired
SHORT_LIST: Final = 16
EXPECT_S: Final = 1.0  # a prefix is expected for twice its predicted prefill time, plus this


class _Local(NamedTuple):
    """A decode worker that may compute the prompt, with the cost and the time that it would be busy."""

    cost_s: float
    busy_s: float
    member: Member


class LeastCost:
    """Picks the pair of least cost.

    Args:
        clock: clock of the heartbeats' timestamps.
        rng: decides between equal costs.
        prefixes: which worker caches which prefixes; None ignores caches.
        weights: constants for what is not measured.
        local: whether decode workers may compute prompts; None: never.
    """

    def __init__(
        self,
        clock: Clock,
        rng: random.Random,
        prefixes: FleetPrefixIndex | None = None,
        weights: CostWeights = WEIGHTS,
        local: LocalPrefill | None = None,
    ) -> None:
        self._local = local or LocalPrefill()
        self.name = "least_cost" if prefixes is None else "prefix"
        self._clock = clock
        self._rng = rng
        self._prefixes = prefixes
        self._weights = weights
        self._loads = Loads()
        self._in_turn = RoundRobin()
        self._named: tuple[object, ...] = ()  # the request and naming that `_names` belongs to
        self._names: tuple[bytes, ...] = ()

    def pick(
        self,
        prefill: Sequence[Member],
        decode: Sequence[Member],
        excluded: Set[Incarnations] = NOBODY,
        request: GenerationRequest | None = None,
    ) -> Pair:
        """Pick the pair of least cost, or a decode worker alone, and add the request to their load.

        Raises:
            NoWorker: a role has no worker.
            WorkersIncompatible: every pair is excluded.
        """
        require(decode, DECODE)
        must = self._local.required(prefill, decode, excluded, request)
        if not must:
            require(prefill, PREFILL)
        now_s = self._clock.now_s()
        self._loads.keep([*prefill, *decode])
        prompt_len = request.prompt_len if request is not None else 1
        asked = RequestNeeds(prompt_len=prompt_len, block_size=max(1, decode[0].state.block_size))
        able = must or self._local.optional(decode, excluded, request)
        matched = self._match([*prefill, *able], request, now_s)
        at_prefill = self._prefill_costs(prefill, asked, matched, now_s)
        at_decode = self._decode_costs(decode, asked, now_s)
        paces = self._paces(at_decode, at_prefill, now_s)
        local = self._local_costs(able, at_decode, paces, asked, matched, now_s, is_must=bool(must))
        is_canary = request is not None and request.split_only  # it must reach every worker, even the most expensive
        if must:
            reason = self._local.required_reason(prefill)
            if is_canary:
                member = self._in_turn.pick(must, must).decode
                local = [item for item in local if item.member is member]
            return self._keep(self._least(local), asked, matched, now_s, request, reason)
        try:
            if is_canary:
                pair = dataclasses.replace(self._in_turn.pick(prefill, decode, excluded), routing=self.name)
            else:
                pair = self._cheapest(at_prefill, at_decode, asked, excluded)
        except WorkersIncompatible:
            local = self._local_costs(able, at_decode, paces, asked, matched, now_s, is_must=True)
            if not local:
                raise
            return self._keep(self._least(local), asked, matched, now_s, request, "incompatible")
        if local:
            least = self._least(local)
            if least.cost_s < self._split_s(pair, at_prefill, at_decode, asked, matched):
                return self._keep(least, asked, matched, now_s, request, "cheaper")
        self._local.chosen(SPLIT, self._local.split_reason(able, bool(local), request))
        self._send(pair, asked, at_prefill, matched, now_s, request)
        return dataclasses.replace(pair, expected_cached_len=matched.get(pair.prefill.incarnation, 0))

    def _keep(
        self,
        chosen: _Local,
        asked: RequestNeeds,
        matched: dict[Incarnation, int],
        now_s: float,
        request: GenerationRequest | None,
        reason: str,
    ) -> Pair:
        """Let a decode worker compute the prompt."""
        self._local.chosen(LOCAL, reason)
        member = chosen.member
        cached_len = matched.get(member.incarnation, 0)
        self._loads.of(member).sent.append(SentRequest(now_s, asked.prompt_len - cached_len, asked.num_blocks))
        self._expect(member, cached_len, chosen.busy_s, matched, now_s, request)
        return Pair(member, member, expected_cached_len=cached_len, routing=self.name)

    def _least(self, local: Sequence[_Local]) -> _Local:
        least_s = min(item.cost_s for item in local)
        return self._rng.choice([item for item in local if item.cost_s <= least_s + TIE_S])

    def _paces(
        self,
        at_decode: list[tuple[float, Member]],
        at_prefill: list[tuple[PrefillCost, Member, WorkerLoad]],
        now_s: float,
    ) -> list[Pace]:
        """Measured paces, decode workers' first; only recent ones if there are any."""
        loads = [self._loads.of(member) for _, member in at_decode] + [load for _, _, load in at_prefill]
        lately = [pace for load in loads if (pace := load.believed_pace(now_s)) is not None]
        return lately or [load.pace for load in loads if load.pace is not None]

    def _local_costs(
        self,
        able: Sequence[Member],
        at_decode: list[tuple[float, Member]],
        paces: Sequence[Pace],
        asked: RequestNeeds,
        matched: dict[Incarnation, int],
        now_s: float,
        *,
        is_must: bool,
    ) -> list[_Local]:
        """Costs at the decode workers where they are known; at all of them if one must compute the prompt."""
        incarnations, costs = {member.incarnation for member in able}, []
        for decode_s, member in at_decode:
            if member.incarnation not in incarnations:
                continue
            load = self._loads.of(member)
            cost = local_cost(
                load,
                asked,
                assumed=next(iter(paces), None),
                cached_len=matched.get(member.incarnation, 0),
                step_s=load.step_s or self._weights.step_s,
                now_s=now_s,
                is_must=is_must,
                weights=self._weights,
            )
            if cost is not None:
                costs.append(_Local(decode_s + cost.total_s, cost.queue_s + cost.compute_s + cost.steps_s, member))
        return costs

    def _split_s(
        self,
        pair: Pair,
        at_prefill: list[tuple[PrefillCost, Member, WorkerLoad]],
        at_decode: list[tuple[float, Member]],
        asked: RequestNeeds,
        matched: dict[Incarnation, int],
    ) -> float:
        """Cost of the best pair, in the same terms as `local_cost`."""
        cost, load = next((cost, load) for cost, member, load in at_prefill if member is pair.prefill)
        decode_s = next(decode_s for decode_s, member in at_decode if member is pair.decode)
        edge = load.edges.get(_incoming_of(pair.decode))
        edge_s = edge_cost(
            edge,
            asked,
            bytes_per_position=load.bytes_per_position,
            bytes_per_s=edge.bytes_per_s if edge is not None else 0.0,
            compute_s=cost.compute_s,
        )
        return decode_s + split_cost(
            load,
            cost,
            asked,
            cached_len=matched.get(pair.prefill.incarnation, 0),
            edge_s=edge_s,
            round_trip_s=edge.round_trip_s if edge is not None else 0.0,
        )

    def cached_len(self, prefill: Sequence[Member], decode: Sequence[Member], request: GenerationRequest) -> int:
        """Longest cached prefix of the prompt, in tokens, at any worker that may compute it."""
        must = self._local.required(prefill, decode, NOBODY, request)
        members = must or [*prefill, *self._local.optional(decode, NOBODY, request)]
        return max(self._match(members, request, self._clock.now_s()).values(), default=0)

    def _match(
        self, members: Sequence[Member], request: GenerationRequest | None, now_s: float
    ) -> dict[Incarnation, int]:
        """Prompt tokens that each worker has cached, or is about to; the last token is always computed."""
        if self._prefixes is None or request is None or request.sampling.prompt_logprobs is not None:
            return {}
        found: dict[Incarnation, int] = {}
        matches: dict[tuple[object, ...], dict[Incarnation, int]] = {}  # by naming, usually one for all workers
        for member in members:
            if not member.state.HasField("prefix_naming"):
                continue
            naming = member.state.prefix_naming
            key = (naming.model, naming.block_size, naming.with_mtp, naming.with_checkpoints)
            if key not in matches:
                names = self._block_names(member, request)[: (request.prompt_len - 1) // naming.block_size]
                match = self._prefixes.match_checkpoints if naming.with_checkpoints else self._prefixes.match
                matches[key] = match(names, now_s)
            found[member.incarnation] = matches[key].get(member.incarnation, 0) * naming.block_size
        return found

    def _block_names(self, member: Member, request: GenerationRequest) -> tuple[bytes, ...]:
        naming = member.state.prefix_naming
        key = (request.prompt_token_ids, request.tenant, naming.model, naming.block_size, naming.with_mtp)
        # The answers of one request arrive in a row, with the same prompt.
        if not self._named or self._named[0] is not key[0] or self._named[1:] != key[1:]:
            self._named = key
            self._names = block_hashes(
                request.prompt_token_ids,
                model=naming.model,
                tenant=request.tenant,
                block_size=naming.block_size,
                with_mtp=naming.with_mtp,
            )
        return self._names

    def _prefill_costs(
        self, members: Sequence[Member], asked: RequestNeeds, matched: dict[Incarnation, int], now_s: float
    ) -> list[tuple[PrefillCost, Member, WorkerLoad]]:
        loads = [self._loads.of(member) for member in members]
        rates = [load.believed_tokens_per_s(now_s) for load in loads]
        assumed = _mean(rates) or _mean([load.tokens_per_s for load in loads]) or self._weights.tokens_per_s
        costs = []
        for member, load, rate in zip(members, loads, rates, strict=True):
            num_names = None
            if self._prefixes is not None and member.incarnation in matched:
                num_names = self._prefixes.num_names_of(member.incarnation)
            cost = prefill_cost(
                load,
                asked,
                tokens_per_s=rate or assumed,
                cached_len=matched.get(member.incarnation, 0),
                now_s=now_s,
                num_names=num_names,
                weights=self._weights,
            )
            costs.append((cost, member, load))
        return costs

    def _decode_costs(self, members: Sequence[Member], asked: RequestNeeds, now_s: float) -> list[tuple[float, Member]]:
        loads = [self._loads.of(member) for member in members]
        times = [load.believed_step_s(now_s) for load in loads]
        assumed = _mean(times) or _mean([load.step_s for load in loads]) or self._weights.step_s
        costs = [
            decode_cost(load, asked, step_s=step_s or assumed, weights=self._weights)
            for load, step_s in zip(loads, times, strict=True)
        ]
        return list(zip(costs, members, strict=True))

    def _cheapest(
        self,
        at_prefill: list[tuple[PrefillCost, Member, WorkerLoad]],
        at_decode: list[tuple[float, Member]],
        asked: RequestNeeds,
        excluded: Set[Incarnations],
    ) -> Pair:
        lists = [(at_prefill, at_decode)]
        if len(at_prefill) * len(at_decode) > MAX_PAIRS:
            short = (
                sorted(at_prefill, key=lambda item: (item[0].total_s, self._rng.random()))[:SHORT_LIST],
                sorted(at_decode, key=lambda item: (item[0], self._rng.random()))[:SHORT_LIST],
            )
            lists.insert(0, short)
        for some_prefill, some_decode in lists:
            costs = self._pair_costs(some_prefill, some_decode, asked, excluded)
            if costs:
                least_s = min(cost for cost, _ in costs)
                return self._rng.choice([pair for cost, pair in costs if cost <= least_s + TIE_S])
        message = f"none of {len(at_prefill)} prefill workers can hand over to any of {len(at_decode)} decode workers"
        raise WorkersIncompatible(message, num_prefill=len(at_prefill), num_decode=len(at_decode))

    def _pair_costs(
        self,
        at_prefill: list[tuple[PrefillCost, Member, WorkerLoad]],
        at_decode: list[tuple[float, Member]],
        asked: RequestNeeds,
        excluded: Set[Incarnations],
    ) -> list[tuple[float, Pair]]:
        assumed = _mean([edge.bytes_per_s for _, _, load in at_prefill for edge in load.edges.values()])
        incoming_transfers = [(cost_s, member, _incoming_of(member)) for cost_s, member in at_decode]
        costs = []
        for prefill, prefill_member, load in at_prefill:
            for decode_s, decode_member, incoming in incoming_transfers:
                if (prefill_member.incarnation, decode_member.incarnation) in excluded:
                    continue
                edge_s = edge_cost(
                    load.edges.get(incoming),
                    asked,
                    bytes_per_position=load.bytes_per_position,
                    bytes_per_s=assumed,
                    compute_s=prefill.compute_s,
                )
                cost_s = prefill.total_s + decode_s + edge_s
                costs.append((cost_s, Pair(prefill_member, decode_member, routing=self.name)))
        return costs

    def _send(
        self,
        pair: Pair,
        asked: RequestNeeds,
        at_prefill: list[tuple[PrefillCost, Member, WorkerLoad]],
        matched: dict[Incarnation, int],
        now_s: float,
        request: GenerationRequest | None,
    ) -> None:
        cached_len = matched.get(pair.prefill.incarnation, 0)
        own_len = asked.prompt_len - cached_len
        num_new = -(-own_len // asked.block_size)
        self._loads.of(pair.prefill).sent.append(SentRequest(now_s, own_len, num_new))
        self._loads.of(pair.decode).sent.append(SentRequest(now_s, 0, asked.num_blocks))
        cost = next(cost for cost, member, _ in at_prefill if member is pair.prefill)
        self._expect(pair.prefill, cached_len, cost.queue_s + cost.compute_s, matched, now_s, request)

    def _expect(
        self,
        member: Member,
        cached_len: int,
        busy_s: float,
        matched: dict[Incarnation, int],
        now_s: float,
        request: GenerationRequest | None,
    ) -> None:
        """Expect a worker to hold the prompt's blocks once it has computed them."""
        if self._prefixes is None or request is None or member.incarnation not in matched:
            return
        naming = member.state.prefix_naming
        first, names = cached_len // naming.block_size, self._block_names(member, request)
        made = list(names[first:])
        if naming.with_checkpoints:
            num_shared = self._prefixes.match(names, now_s).get(member.incarnation, 0)
            counts = checkpoint_blocks(
                request.prompt_len,
                naming.block_size,
                num_cached=first,
                num_shared=max(first, num_shared),
                interval=naming.checkpoint_interval,
            )
            made += [checkpoint_name(names[count - 1]) for count in counts]
        self._prefixes.expect(member.incarnation, made, now_s + EXPECT_S + 2 * busy_s)


def _incoming_of(decode: Member) -> tuple[str, int]:
    return decode.state.kv_address, decode.state.kv_epoch or decode.state.epoch


def _mean(values: list[float]) -> float:
    """Mean of the measured (positive) values; 0 if there is none."""
    measured = [value for value in values if value > 0]
    return sum(measured) / len(measured) if measured else 0.0
