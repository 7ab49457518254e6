"""Every mode on mixed batches, against plain Python; what must not be read is NaN."""

import math

import pytest
import torch

from baton.core.errors import ConfigInvalid
from baton.core.requests.sampling import SamplingParams
from baton.core.verification import DraftSampleMethod, VerificationConfig, VerificationMode
from baton.engine.sampling.sampler import draw_noise, sampling_rows
from baton.engine.speculation.verifiers import conditional_rates, make_verifier
from baton.engine.speculation.verify import DraftIds, DraftLaw, DraftProbs, VerifyInputs
from baton.kernels.dispatch_mode import DispatchMode
from baton.kernels.sampling.noise import Purpose
from baton.tests.engine import reference
from baton.tests.engine import rejection_reference as rejection

pytestmark = pytest.mark.fast
CPU = torch.device("cpu")
VOCAB = 7
HEAD = [5, 0, 3, 1]
MODES = [
    VerificationConfig(),
    VerificationConfig(mode=VerificationMode.REJECTION, block=False),
    VerificationConfig(mode=VerificationMode.REJECTION, block=True),
    VerificationConfig(mode=VerificationMode.REJECTION, draft_sample_method=DraftSampleMethod.GREEDY),
    VerificationConfig.synthetic(0.9, 0.7, 0.2, 0.15, 0.1, 0.05),
    VerificationConfig.force(2),
]


def params_of(num_rows):
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=11),
        SamplingParams(seed=12, temperature=0.6, top_k=4),
        SamplingParams(seed=13, temperature=1.8, top_p=0.9),
    ]
    return [kinds[row % 4] for row in range(num_rows)]


def softmax(pairs, size):
    top = max(logit for _, logit in pairs)
    weights = dict.fromkeys(range(size), 0.0) | {token: math.exp(logit - top) for token, logit in pairs}
    return [weights[token] / sum(weights.values()) for token in range(size)]


def uniforms(seed, position, purpose, count):
    words = []
    for block in range(-(-count // 4)):
        words += reference.philox((block, position, 0, int(purpose)), (seed % 2**32, seed >> 32))
    return [(word + 0.5) / 2**32 for word in words[:count]]


class Batch:
    """A mixed batch whose unreadable parts are NaN, and the answer that plain Python gives."""

    def __init__(self, config, *, num_rows=80, num_drafts=3, dtype=torch.float64, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.config, self.num_drafts = config, num_drafts
        self.params = params_of(num_rows)
        self.logits_BQV = (torch.randn(num_rows, num_drafts + 1, VOCAB, generator=generator) * 2).to(dtype)
        # Sampled rows often draft what is likely, so that all lengths occur.
        draft_logits = self.logits_BQV[:, :num_drafts][..., HEAD].double()
        draft_logits = draft_logits + torch.randn(draft_logits.shape, generator=generator, dtype=torch.float64)
        self.q_BKC = draft_logits.softmax(-1)
        columns = torch.multinomial(self.q_BKC.flatten(0, 1), 1, generator=generator) if num_drafts else torch.zeros(0)
        self.ids_BK = torch.tensor(HEAD)[columns.long()].view(num_rows, num_drafts)
        greedy = torch.rand(num_rows, num_drafts, generator=generator) < 0.7
        likely = self.logits_BQV[:, :num_drafts].float().argmax(-1)
        is_greedy = torch.tensor([item.greedy for item in self.params])[:, None]
        self.ids_BK = torch.where(is_greedy & greedy, likely, self.ids_BK)
        self.cap_B = torch.randint(0, num_drafts + 2, (num_rows,), generator=generator).clamp(max=num_drafts)
        if num_drafts:
            self.ids_BK[::9, -1] = -1
        self.position_B = torch.arange(num_rows) * 5 + 3

    def usable(self, row):
        there = [at for at in range(self.num_drafts) if int(self.ids_BK[row, at]) < 0]
        return min([int(self.cap_B[row]), *there])

    def inputs(self, law):
        sampling = sampling_rows(self.params, CPU)
        probs = None
        if law is DraftLaw.SAMPLED and sampling is not None:
            probs_SKC = self.q_BKC[sampling.index_S].clone()
            for place, row in enumerate(sampling.index_S.tolist()):
                probs_SKC[place, self.usable(row) :] = torch.nan
            t2d = [HEAD.index(token) if token in HEAD else -1 for token in range(VOCAB)]
            probs = DraftProbs(probs_SKC, torch.tensor(t2d))
        logits = self.logits_BQV.clone()
        for row in range(len(self.params)):
            logits[row, self.usable(row) + 1 :] = torch.nan
        noise = None
        if law is DraftLaw.COUPLED:
            noise = draw_noise(sampling, self.position_B, self.num_drafts + 1, VOCAB, torch.float64)
        return VerifyInputs(
            drafts=DraftIds(self.ids_BK.clone()),
            draft_probs=probs,
            target_logits_BQV=logits,
            sampling=sampling,
            noise_SQV=noise,
            position_B=self.position_B,
            draft_cap_B=self.cap_B,
        )

    def expected(self, row):
        drafts = self.ids_BK[row].tolist()[: self.usable(row)]
        params, position = self.params[row], int(self.position_B[row])
        logits = self.logits_BQV[row].double().tolist()
        if self.config.mode is VerificationMode.REJECTION and not params.greedy:
            return self._rejected(row, drafts, logits)
        target = [reference.choose(logits[at], params, position + at) for at in range(len(drafts) + 1)]
        if self.config.mode is VerificationMode.FORCE:
            accepted = min(self.config.forced_len, len(drafts))
        elif self.config.mode is VerificationMode.SYNTHETIC:
            words = []
            for block in range(2):
                words += reference.philox((block, position, row, int(Purpose.SYNTHETIC)), (0x5EED, 0))
            rates = (0.9, 0.7 / 0.9, 0.2 / 0.7, 0.15 / 0.2, 0.1 / 0.15, 0.05 / 0.1)
            stands = [(word + 0.5) / 2**32 < rate for word, rate in zip(words, rates, strict=False)]
            accepted = min(next((at for at, stand in enumerate(stands) if not stand), 6), len(drafts))
        else:
            accepted = next((at for at, draft in enumerate(drafts) if draft != target[at]), len(drafts))
        return [*drafts[:accepted], target[accepted]]

    def _rejected(self, row, drafts, logits):
        params, position = self.params[row], int(self.position_B[row])
        is_point = self.config.draft_sample_method is DraftSampleMethod.GREEDY
        block = self.config.block and not is_point

        class Row:
            vocab_size = VOCAB

            def p(_, prefix):
                return softmax(reference.processed(logits[len(prefix)], params), VOCAB)

            def q(_, prefix):
                law = dict(zip(HEAD, self.q_BKC[row, len(prefix)].tolist(), strict=True))
                return [law.get(token, 0.0) for token in range(VOCAB)]

        chances, residuals = rejection.thresholds(Row(), tuple(drafts), is_point, block)
        accepted = rejection.accepted_len(
            uniforms(params.seed, position, Purpose.ACCEPT, self.num_drafts)[: len(drafts)], chances, block
        )
        u = uniforms(params.seed, position, Purpose.RESIDUAL, 1)[0]
        return [*drafts[:accepted], rejection.inverse(residuals[accepted], u)]


@pytest.mark.long
@pytest.mark.parametrize("num_drafts", [0, 1, 3, 6])
@pytest.mark.parametrize("config", MODES, ids=lambda config: f"{config.mode.value}-{config.block}")
def test_a_mixed_batch_against_plain_python(config, num_drafts):
    if config.mode is VerificationMode.FORCE:
        config = VerificationConfig.force(min(2, num_drafts))
    verifier = make_verifier(config, num_drafts)
    batch = Batch(config, num_drafts=num_drafts)
    verified = verifier.verify(batch.inputs(verifier.draft_law))
    lens = verified.accepted_len_B.tolist()
    for row, (tokens, accepted) in enumerate(zip(verified.token_ids_BQ.tolist(), lens, strict=True)):
        assert tokens[: accepted + 1] == batch.expected(row), row
        assert not any(tokens[accepted + 1 :])
    if num_drafts == 3:
        assert set(lens) >= {0, 1, 2}


@pytest.mark.parametrize("config", MODES[1:4], ids=lambda config: f"{config.draft_sample_method}-{config.block}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_logits_give_the_same_tokens_but_at_ties(config, dtype):
    verifier = make_verifier(config, 3)
    batch = Batch(config, dtype=dtype)
    verified = verifier.verify(batch.inputs(verifier.draft_law))
    lens = verified.accepted_len_B.tolist()
    tokens = [row[: n + 1] for row, n in zip(verified.token_ids_BQ.tolist(), lens, strict=True)]
    assert tokens == [batch.expected(row) for row in range(len(tokens))]


@pytest.mark.parametrize("config", MODES[:4], ids=lambda config: f"{config.mode.value}-{config.block}")
def test_a_row_does_not_depend_on_its_neighbours(config):
    verifier = make_verifier(config, 3)
    batch = Batch(config, num_rows=12)
    together = verifier.verify(batch.inputs(verifier.draft_law))
    for row in range(12):
        alone = Batch(config, num_rows=12)
        alone.params = [batch.params[row]]
        for name in ("logits_BQV", "q_BKC", "ids_BK", "cap_B", "position_B"):
            setattr(alone, name, getattr(batch, name)[row : row + 1])
        verified = verifier.verify(alone.inputs(verifier.draft_law))
        assert verified.token_ids_BQ.tolist() == together.token_ids_BQ[row : row + 1].tolist()


@pytest.mark.parametrize("config", MODES[1:3], ids=lambda config: f"{config.draft_sample_method}-{config.block}")
def test_drafts_a_head_could_not_have_made_never_stand(config):
    """A head none of whose tokens the request allows has a law of zeros: the target alone decides."""
    verifier = make_verifier(config, 2)
    batch = Batch(config, num_drafts=2)
    inputs = batch.inputs(verifier.draft_law)
    inputs.draft_probs.probs_SKC.zero_()
    verified = verifier.verify(inputs)
    assert verified.accepted_len_B[inputs.sampling.index_S].eq(0).all()


class NoHostReads(DispatchMode):
    """Raises where a value of a tensor would have to be known on the host."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__
        refused = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal.default", "item")
        assert not any(part in name for part in refused), name
        assert "_to_copy" not in name or (kwargs or {}).get("device") is None
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("config", MODES, ids=lambda config: f"{config.mode.value}-{config.block}")
def test_nothing_is_read_on_the_host(config):
    verifier = make_verifier(config, 3)
    inputs = Batch(config).inputs(verifier.draft_law)
    with NoHostReads():
        verifier.verify(inputs)


@pytest.mark.parametrize("config", MODES, ids=lambda config: f"{config.mode.value}-{config.block}")
def test_no_sequence_at_all_and_only_greedy_ones(config):
    verifier = make_verifier(config, 2 if config.mode is VerificationMode.FORCE else 1)
    for num_rows in (0, 2):
        verified = verifier.verify(
            VerifyInputs(
                drafts=DraftIds(torch.zeros(num_rows, 1, dtype=torch.int64)),
                target_logits_BQV=torch.zeros(num_rows, 2, 3),
                sampling=None,
                position_B=torch.zeros(num_rows, dtype=torch.int64),
                draft_cap_B=torch.ones(num_rows, dtype=torch.int64),
            )
        )
        assert verified.token_ids_BQ.shape == (num_rows, 2)
        assert verified.token_ids_BQ.eq(0).all()


def test_synthetic_rates_are_met():
    verifier = make_verifier(VerificationConfig.synthetic(0.8, 0.6, 0.5), 3)
    num_rows = 20_000
    verified = verifier.verify(
        VerifyInputs(
            drafts=DraftIds(torch.ones(num_rows, 3, dtype=torch.int64)),
            target_logits_BQV=torch.zeros(num_rows, 4, 2),
            sampling=None,
            position_B=torch.full((num_rows,), 9),
            draft_cap_B=torch.full((num_rows,), 3),
        )
    )
    for place, rate in enumerate((0.8, 0.6, 0.5)):
        assert (verified.accepted_len_B > place).double().mean().item() == pytest.approx(rate, abs=0.015)


def test_rates_of_a_mean_vary_as_little_as_they_can():
    assert VerificationConfig.synthetic_mean(1.25, 3).acceptance_rates == (1.0, 0.25, 0.0)
    assert VerificationConfig.synthetic_mean(3.0, 3).acceptance_rates == (1.0, 1.0, 1.0)
    assert conditional_rates((0.8, 0.4, 0.0, 0.0)) == (0.8, 0.5, 0.0, 0.0)
    assert conditional_rates(()) == ()


@pytest.mark.parametrize("rates", [(0.5, 0.6), (1.2,), (-0.1,), (math.nan,)])
def test_rates_that_are_none_are_refused(rates):
    with pytest.raises(ConfigInvalid, match="acceptance_rates"):
        VerificationConfig.synthetic(*rates)


def test_what_does_not_fit_the_drafts_is_refused():
    with pytest.raises(ConfigInvalid, match="acceptance_rates"):
        make_verifier(VerificationConfig.synthetic(0.5), 2)
    with pytest.raises(ConfigInvalid, match="forced_len"):
        make_verifier(VerificationConfig.force(3), 2)
    with pytest.raises(ConfigInvalid, match="forced_len"):
        VerificationConfig.force(-1)
    with pytest.raises(ConfigInvalid, match="mean_accepted_len"):
        VerificationConfig.synthetic_mean(2.5, 2)


@pytest.mark.parametrize("config", [VerificationConfig.synthetic(0.5), VerificationConfig.force(1)])
def test_made_up_acceptance_is_never_served(config):
    with pytest.raises(ConfigInvalid, match="never served"):
        config.require_servable()
    for servable in MODES[:4]:
        servable.require_servable()
