"""The tiny models' cards, every figure of it taken from the training report."""

from typing import Any

TEMPLATE = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [{tag}, mtp, speculative-decoding]
---

# {title}

A {total_m:.2f} M-parameter mixture-of-experts model of the {architecture} architecture with a
multi-token-prediction (MTP) head, trained on the sources of Python's standard library. It exists
so that serving code can be run, tested and measured with text that means something: {behaving} \
and draft acceptance behave as in a large model, and it fits in a package.
It is not a coding assistant.

## Shape

| | |
| --- | --- |
| parameters | {total:,} ({trunk:,} trunk, {mtp:,} MTP head) |
| layers, hidden size | {layers} + 1 MTP layer, {hidden} |
{layer_rows}
| vocabulary | {vocab}, byte-level BPE, embedding and LM head tied |
| positions | {max_positions}, RoPE base {rope_theta:g} |
| weights | bfloat16, one `model.safetensors`, published {names} names |

MTP entry `i` takes token `i + 1` and the trunk's hidden state `i` (after the final norm) and
predicts token `i + 2`; for further drafts the head is chained on its own normed output.
`transformers` loads the trunk and ignores {head_names}.

`<|endoftext|>` precedes and closes every file, and is the end and padding token. `<|im_start|>`
and `<|im_end|>` are in the vocabulary, and a chat template uses them, so that chat paths can be
exercised; no chat was in the training data.

## Figures

All of the exported bfloat16 weights, from `training.json`.

| held-out text | |
| --- | --- |
| bits per byte | {bits:.4f} |
| nats per token | {nats:.4f} |

Total negative log likelihood over the UTF-8 bytes of the {held_out_files} held-out files
({held_out_bytes:,} bytes, {held_out_tokens:,} tokens). Each file is read from `<|endoftext|>` and
closed by one; windows of {max_positions} tokens advance by {stride}, so every token after a file's
first window has at least {stride} tokens of context.

| greedy speculative decoding | acceptance | by depth | tokens per verify step |
| --- | --- | --- | --- |
{speculation}

{prompts} prompts of {shortest} to {longest} tokens cut at random from held-out files, {new_tokens}
new tokens each, end tokens not stopping a row. Acceptance is accepted over proposed drafts;
depth `d` counts only steps that accepted every earlier draft. It often falls
into loops when decoding greedily (on average {distinct:.0%} of a continuation's 4-grams are
distinct), and loops are easily foreseen. So here are the drafts against the trunk on held-out text
itself, given the true tokens so far:

| depth | same likeliest token | common probability |
| --- | --- | --- |
{drafts}

Common probability, the sum over tokens of the smaller of both probabilities, is the acceptance of
lossless sampling at temperature 1.

A greedy continuation of a prompt of ours:

```python
{sample}
```

## Data

The `*.py` files of CPython's standard library, tests included, less `encodings`, `pydoc_data`,
build-specific files, files that are not UTF-8, and identical copies: {train_files:,} files and
{train_bytes:,} bytes ({train_tokens:,} tokens) for training. The held-out files were drawn at
random by file (seed {split_seed}); the tokenizer saw none of them. Near-duplicates were not
removed: {shared:.1%} of the held-out bytes lie in runs of five lines that training files hold
verbatim. Files of one package share idiom beyond that, so the figures speak of this library, not
of Python at large. The held-out set also chose the checkpoint and, roughly, the settings, so they
are slightly flattered. Corpus fingerprint:
`{fingerprint}`.

CPython's sources are under the PSF License Agreement (Python Software Foundation License
Version 2), copyright the Python Software Foundation. The weights are under Apache-2.0.

## Training

{budget}The trunk took {steps:,} steps of {batch} windows of {length} tokens ({epochs:.0f} passes), with the
MTP head's loss at weight {joint:g}, dropout {dropout:g} and weight decay {decay:g}; Muon for
matrices, AdamW for the rest, the rate falling linearly to zero. The head alone then took
{head_steps:,} steps of {head_batch} windows against the frozen trunk's predictions, chained three
deep. {seconds:.0f} s in all on {hardware} with torch {torch}. To reproduce (up to
the rounding of other hardware and library versions):

```
python scripts/train_tiny.py {flags}--out assets/{title} --corpus DIR
```

where `DIR` is the installed standard library of CPython 3.11.7, by default that of the running
interpreter; `training.json` of the same corpus has the same fingerprint.

## Limits

It writes plausible lines of Python that do not work. It knows no language but Python and its
comments, follows no instructions, loops under greedy decoding, and has seen at most
{max_positions} positions. It can repeat its training text.
"""

MOE = {
    "title": "tiny",
    "tag": "qwen3_moe",
    "architecture": "Qwen3-MoE",
    "behaving": "routing,\ngrouped-query attention",
    "layer_rows": (
        "| attention | {heads} query heads, {kv_heads} key-value heads of {head_dim}, QK-norm |\n"
        "| experts | {experts} of width {expert_width}, top {top_k}, renormalised |"
    ),
    "names": "Qwen3-MoE and `mtp.*`",
    "head_names": "`mtp.*`",
    "flags": "",
}
HYBRID = {
    "title": "tiny-hybrid",
    "tag": "qwen3_5_moe_text",
    "architecture": "Qwen3.5-MoE",
    "behaving": "gated\ndelta nets, gated attention, routing",
    "layer_rows": (
        "| gated delta nets | all but each {interval}th layer; {delta_key_heads} key heads of {delta_key_dim}, "
        "{delta_value_heads} value heads of {delta_value_dim}, convolution over {taps} positions |\n"
        "| attention | the others and the MTP layer; {heads} query heads, {kv_heads} key-value heads of {head_dim}, "
        "QK-norm, output gate, {turned_share:.0%} of the columns turned |\n"
        "| experts | {experts} of width {expert_width}, top {top_k}, renormalised, and a gated shared one of width "
        "{shared_width} |"
    ),
    "names": "Qwen3.5-MoE and `mtp.*`",
    "head_names": "`mtp.*`",
    "flags": "--family hybrid ",
}
MLA = {
    "title": "tiny-mla",
    "tag": "deepseek_v3",
    "architecture": "DeepSeek-V3",
    "behaving": "latent\nattention, routing in groups",
    "layer_rows": (
        "| attention | {heads} heads over a latent of {latent_dim} and {rope_dim} turned columns; queries of a latent "
        "of {query_rank}; {nope_dim} + {rope_dim} columns of a query, {value_dim} of a value |\n"
        "| experts | {experts} of width {expert_width} in {groups} groups, top {top_k} of {kept_groups} groups, by "
        "sigmoids and a bias, and a shared one; first {dense_layers} dense, of width {dense_width} |"
    ),
    "names": "DeepSeek-V3",
    "head_names": "the head, layer `{layers}`",
    "flags": "--family mla ",
}
FAMILIES = {"moe": MOE, "hybrid": HYBRID, "mla": MLA}


def render(report: dict[str, Any]) -> str:
    """Return the card."""
    shape, data, plan = report["shape"], report["data"], report["plan"]
    runs, drafts = report["speculation"], report["drafts_on_held_out_text"]
    rows = []
    for depth in range(1, 5):
        run = runs[f"k{depth}"]
        by_depth = ", ".join(f"{value:.3f}" for value in run["acceptance_by_depth"])
        rows.append(f"| k = {depth} | {run['acceptance']:.3f} | {by_depth} | {run['tokens_per_step']:.2f} |")
    steps = report["trunk_training"].get("steps", plan["steps"])
    budget = ""
    if plan.get("trunk_seconds"):
        budget = (
            f"Time bound the steps: {plan['trunk_seconds']:g} s of the trunk, {plan['head_seconds']:g} s of the head.\n"
        )
    family = FAMILIES[plan.get("family", "moe")]
    pairs = zip(drafts["same_choice_by_depth"], drafts["common_probability_by_depth"], strict=True)
    values = {
        **shape,
        **data,
        **plan,
        **report["parameters"],
        "total_m": report["parameters"]["total"] / 1e6,
        "bits": report["held_out_bits_per_byte"],
        "nats": report["held_out_nats_per_token"],
        "stride": shape["max_positions"] // 2,
        "speculation": "\n".join(rows),
        "prompts": runs["prompts"],
        "shortest": runs["prompt_tokens"][0],
        "longest": runs["prompt_tokens"][1],
        "new_tokens": runs["new_tokens"],
        "distinct": runs["distinct_4_grams"],
        "drafts": "\n".join(
            f"| {depth} | {same:.3f} | {common:.3f} |" for depth, (same, common) in enumerate(pairs, 1)
        ),
        "sample": (report["sample"]["prompt"] + report["sample"]["greedy"]).rstrip(),
        "shared": data["held_out_in_shared_5_line_runs"],
        "steps": steps,
        "head_steps": report["head_training"].get("steps", plan["head_steps"]),
        "budget": budget,
        "epochs": steps * plan["batch"] * plan["length"] / data["train_tokens"],
        "seconds": report["trunk_training"]["seconds"] + report["head_training"]["seconds"],
        "hardware": f"one {report['environment']['hardware']}",
        "torch": report["environment"]["torch"],
    }
    parts = {key: text.format(**values) for key, text in family.items()}
    return TEMPLATE.format(**values, **parts)
