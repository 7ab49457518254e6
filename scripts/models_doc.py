"""Write docs/models.md: which family is served with which feature, each cell by the test that proves it.

python scripts/models_doc.py            # ends with 1 if the file is not what the tests prove
python scripts/models_doc.py --write    # makes it so; after a family, a feature or a refusal is added

A cell is `yes` if the tests of its column are collected for its family. Refusals are the sentences that `baton check`
gives, made here from config.json alone.
"""

import argparse
import fnmatch
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.cluster.checkpoint import judge
from baton.cluster.resolve import read_config

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
# Families by the names that tests have for them.
FAMILIES = {
    "llama": "Llama 2, 3, 3.1, 3.2, 3.3",
    "mistral": "Mistral 7B, Nemo, Small (no sliding window shorter than the context)",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen2_moe": "Qwen1.5-MoE, Qwen2-MoE",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_5": "Qwen3.5, 3.6, 3.8 (text)",
    "qwen3_5_moe": "Qwen3.5-MoE, 3.6-MoE (text)",
    "qwen3_next": "Qwen3-Next",
    "deepseek_v3": "DeepSeek-V3, V3.1, R1, Kimi-K2",
    "glm4_moe": "GLM-4.5, GLM-4.6",
}


@dataclass(frozen=True, slots=True)
class Feature:
    """A column.

    Attributes:
        name: its heading.
        proofs: patterns of test ids, of each of which one must be collected; `{kind}` is the family. A `|` parts
            patterns that prove the same.
    """

    name: str
    proofs: tuple[str, ...]


_LOGITS = "tests/model/test_families.py::test_logits_are_transformers_at_any_number_of_ranks"
_FP8 = "tests/model/test_float8_checkpoints.py::test_weights_are_values_times_scales_and_gemms_round_activations"
_HYBRID = "tests/model/test_hybrid.py::"
_DEEPSEEK = "tests/model/test_deepseek.py::"
_EXPERTS = "tests/model/test_expert_parallel.py::test_logits_are_those_of_one_process_and_of_cut_experts"
_E2E = "tests/e2e/test_families.py::"
FEATURES = (
    Feature(
        "BF16, FP16",
        (
            f"{_LOGITS}[{{kind}}-*|{_HYBRID}test_logits_are_transformers[{{kind}}-*"
            f"|{_DEEPSEEK}test_logits_are_transformers[{{kind}}-*",
        ),
    ),
    Feature(
        "greedy texts as transformers", ("tests/model/test_texts.py::test_greedy_texts_are_transformers[{kind}-*",)
    ),
    Feature(
        "FP8",
        (
            f"{_FP8}[*-{{kind}}-?]|{_HYBRID}test_every_other_layout_of_float8[{{kind}}-*"
            f"|{_DEEPSEEK}test_every_layout_of_float8[{{kind}}-*",
        ),
    ),
    Feature("TP", (f"{_E2E}test_asynchronous_tokens_are_those_of_one_plain_run[{{kind}}-*-tp2]",)),
    Feature("EP", (f"{_EXPERTS}[{{kind}}, 2 ranks]",)),
    Feature("hand-off", (f"{_E2E}test_disaggregated_tokens_are_those_of_one_process[{{kind}}-*",)),
    Feature("n-grams", (f"{_E2E}test_drafts_change_no_token_that_is_handed_over[{{kind}}-ngram-*",)),
    Feature("EAGLE-3", (f"{_E2E}test_drafts_change_no_token_that_is_handed_over[{{kind}}-eagle3-*",)),
    Feature(
        "MTP",
        (
            "tests/model/test_mtp.py::test_chained_drafts_of_each_family[{kind}]"
            f"|{_HYBRID}test_mtp_entries_are_transformers_to_the_fourth_draft[{{kind}}-*"
            f"|{_DEEPSEEK}test_mtp_entries_are_transformers_to_the_fourth_draft[{{kind}}-*",
        ),
    ),
)
REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("an architecture that is not implemented", {"architectures": ["GemmaForCausalLM"]}),
    ("a sliding window shorter than the context", {"architectures": ["MistralForCausalLM"], "sliding_window": 4096}),
    ("Qwen2's window", {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}),
    (
        "Qwen2.5-1M beyond its first chunk",
        {
            "architectures": ["Qwen2ForCausalLM"],
            "dual_chunk_attention_config": {"chunk_size": 8192, "local_size": 512},
            "max_position_embeddings": 16384,
        },
    ),
    ("AWQ, GPTQ", {"quantization_config": {"quant_method": "awq", "bits": 4}}),
    ("NF4", {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}),
    ("biases of the MLP", {"mlp_bias": True}),
    ("partial rotation", {"partial_rotary_factor": 0.5}),
    (
        "layers of Qwen3.5 without a gate",
        {"architectures": ["Qwen3_5ForCausalLM"], "layer_types": ["full_attention"] * 2, "attn_output_gate": False},
    ),
    (
        "DeepSeek-V2's choice of experts",
        {"architectures": ["DeepseekV3ForCausalLM"], "topk_method": "group_limited_greedy"},
    ),
)
HEAD = """# Models
<!-- scripts/models_doc.py writes this file from the tests -->

`baton check DIR` reports in a second or two what a directory would run as, or why it cannot. A cell is `yes` if the
test suite has the tests of its column for the family, which must pass: logits within 1e-9 of transformers' in float64
on 1, 2 and 4 ranks (Qwen3.5, Qwen3-Next, DeepSeek-V3 and Kimi-K2 on 1 and 2), greedy texts equal to
`transformers.generate`, every float8 layout, and tokens that do not change with tensor parallelism, hand-off,
preemption or drafts. Except as stated below, CUDA graphs, the prefix cache, `--kv-cache-dtype fp8` and
`--batch-invariant` do not depend on the family; with `--batch-invariant`, torch computes the MoE layers. A test
requires that every family uses as few torch operations per layer as Qwen3.

TP is tensor parallelism, EP is expert parallelism (`--enable-expert-parallel`).

"""
TAIL = """
Supported rope types: default, linear, dynamic, llama3 and yarn, each beyond the original context. YaRN lengthens the
model's context if config.json names the original length. MTP needs a checkpoint that has an MTP head; EAGLE-3 needs a
drafter for the model (`--draft-model`). Tool calls and reasoning follow the chat template, not the family
([chat-templates.md](chat-templates.md)). [extending.md](extending.md#adding-a-model) lists the files that another
family takes. Kimi-K2 is published without a tokenizer.json; the error says how to convert its tiktoken.model.

**Qwen3.5 and Qwen3-Next** keep a recurrent state per sequence (gated delta nets). The state is handed off, digested and
preempted like KV, and rejected drafts need no undo. Their logits are tested against transformers' on 1 and 2 ranks; the
number of ranks must divide `linear_num_key_heads`. A cached prefix needs a checkpoint of the state: the third of
several prompts with a common beginning finds one, or with `--state-checkpoint-interval` the second, up to a multiple of
that interval. Of 64 prompts (eight groups of eight, 1,500 shared tokens and 700 of their own, in turn), 48 found their
prefix with room for 12 checkpoints. With an interval 56 did: room for 32 checkpoints at 1,024, for 40 at 512. `baton
check` reports the size of a checkpoint: 90 MiB for the 35B shape. On a GPU, Triton kernels compute these layers
(`kernels/delta_net/`) and CUDA graphs replay decode steps; in steps with chunks they are launched between the graphs'
pieces ([recurrent-state.md](recurrent-state.md)). Of a multimodal directory the text model is served.

**DeepSeek-V3 and Kimi-K2** keep one row of latents per position, whole on every rank (`kernels/mla/latent_rows.py`).
Decode rows attend to the latents directly (`kernels/mla/decode.py`). Prompts attend to keys and values that each layer
expands from them (`kernels/mla/prefill.py`). On a GPU, Triton and Gluon kernels compute both, and CUDA graphs replay
decode steps. Torch computes sizes that have no kernel, and `baton check` says so. `--kv-cache-dtype fp8` is refused.
Torch computes `--batch-invariant`, as for GLM-4.5. Logits of both families are tested against transformers' on 1 and 2
ranks. An MTP head's copies of the embedding and the LM head are not read once samples show that they equal the trunk's.

## What is refused
In the sentence that `baton check` and `baton serve` give, before anything is loaded.

| What | The sentence |
|---|---|
"""
PLAIN = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "head_dim": 16,
}  # fmt: skip


def collected() -> list[str]:
    """Ids of the tests that prove something."""
    proofs = [one for feature in FEATURES for proof in feature.proofs for one in proof.split("|")]
    files = sorted({proof.partition("::")[0] for proof in proofs})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-m", "", *files]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [line for line in found.stdout.splitlines() if "::" in line]


def is_proved(feature: Feature, kind: str, ids: Sequence[str]) -> bool:
    """Whether every proof of a feature is there for a family."""
    patterns = [
        [pattern.format(kind=kind).replace("[", "[[]", 1) for pattern in proof.split("|")] for proof in feature.proofs
    ]
    return all(any(fnmatch.fnmatchcase(test, one) for test in ids for one in some) for some in patterns)


def refusal(changes: dict[str, Any]) -> str:
    """What is said of a directory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "DIR"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(PLAIN | changes))
        found = judge(read_config(None, {"model": str(path), "load_format": "dummy", "device": "cpu"}))
        [error] = found.errors
        return str(error).replace(str(path), "DIR").replace("|", r"\|")


def page() -> str:
    """The whole file."""
    ids = collected()
    lines = [
        "| Family | " + " | ".join(feature.name for feature in FEATURES) + " |",
        "|---" * (len(FEATURES) + 1) + "|",
    ]
    for kind, name in FAMILIES.items():
        cells = ["yes" if is_proved(feature, kind, ids) else "-" for feature in FEATURES]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    refused = [f"| {what} | {refusal(changes)} |" for what, changes in REFUSED]
    return HEAD + "\n".join(lines) + "\n" + TAIL + "\n".join(refused) + "\n"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="write the file instead of comparing it")
    text = page()
    if parser.parse_args().write:
        PAGE.write_text(text)
        return 0
    if PAGE.read_text() == text:
        return 0
    print(f"{PAGE.name} is not what the tests prove: run scripts/models_doc.py --write", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
