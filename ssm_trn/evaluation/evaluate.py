"""`ssm-trn evaluate RUN_DIR`: bits per byte of the held-out text, and tasks through lm-eval."""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ssm_trn.data.token_file import TokenFile, file_sha256
from ssm_trn.evaluation.runs import data_settings
from ssm_trn.evaluation.scoring import bits_per_byte, score_held_out
from ssm_trn.files import write_whole
from ssm_trn.model import WEIGHTS_FILE

FORMAT_VERSION = 1
BITS_PER_BYTE = "bits_per_byte"
EVALUATION_FILE = "evaluation.json"
DEFAULT_TASKS = f"{BITS_PER_BYTE},true_ending,word_order"


def evaluate(
    run_dir: str,
    tasks: str | list[str] = DEFAULT_TASKS,
    benchmarks: str | None = None,
    data: str | None = None,
    limit: int | None = None,
    batch_size: int = 16,
    max_length: int | None = None,
    device: str | None = None,
    online: bool = False,
    output: str | None = None,
) -> dict[str, Any]:
    """Tests a trained model, prints a table and writes RUN_DIR/evaluation.json.

    What the file tells of other tasks stays in it as long as model, limit, max_length, held-out text and lm-eval are
    the same.

    Args:
        run_dir: Folder of the run, after its training.
        tasks: Names, separated by commas: bits_per_byte, true_ending and word_order, which are of the held-out text, or
            tasks of lm-eval.
        benchmarks: Folder with the data files of lm-eval's tasks; by default the variable SSM_TRN_BENCHMARKS names it.
        data: Prepared data folder with the held-out text; by default the one that the run was trained on.
        limit: Use no more than so many items of each task.
        batch_size: Sequences at once; the results do not depend on it.
        max_length: Most tokens that the model sees at once; by default the block length of the training.
        device: Such as cpu or cuda:0; by default a GPU where there is one.
        online: Allow all tasks of lm-eval, with data from the Hugging Face hub.
        output: Another place for evaluation.json.

    Returns:
        What evaluation.json holds.

    Raises:
        FileNotFoundError: The run has no trained model, or a data file is missing.
        ValueError: A task is unknown or another value does not fit.
    """
    names = [name.strip() for name in (tasks.split(",") if isinstance(tasks, str) else tasks)]
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; it must be at least 1")
    if not online:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when `datasets` is first imported, so lm-eval comes after
    from ssm_trn.evaluation.lm import HarnessModel
    from ssm_trn.evaluation.tasks import load_tasks

    data = data or data_settings(run_dir).get("folder")
    lm = HarnessModel(run_dir, batch_size=batch_size, max_length=max_length, device=device)
    path = Path(output or Path(run_dir) / EVALUATION_FILE)
    head = {
        "format_version": FORMAT_VERSION,
        "model_sha256": file_sha256(Path(run_dir) / WEIGHTS_FILE),
        "max_length": lm.max_length,
        "limit": limit,
        "held_out_sha256": TokenFile.open(data, "validation").sha256 if data else None,
        "lm_eval": version("lm_eval"),
    }
    earlier = _earlier(path, head)
    with quiet("lm_eval"):
        named = [name for name in names if name != BITS_PER_BYTE]
        loaded = load_tasks(named, data=data, benchmarks=benchmarks, online=online, pretrained=run_dir)
        new = {BITS_PER_BYTE: _score_held_out(lm, data)} if BITS_PER_BYTE in names else {}
        new["tasks"] = _run_tasks(lm, loaded, limit)
    print(table(new))
    result = {**head, **earlier, **new, "tasks": {**earlier.get("tasks", {}), **new["tasks"]}}
    write_whole(path, json.dumps(result, indent=2) + "\n")
    return result


def table(result: dict[str, Any]) -> str:
    """The values of an evaluation as aligned text; of a group only its mean."""
    rows = [("task", "metric", "value", "", "items")]
    if estimate := result.get(BITS_PER_BYTE):
        interval = f"{estimate['low']:.4f} to {estimate['high']:.4f}"
        rows.append(("held-out text", "bits per byte", f"{estimate['value']:.4f}", interval, ""))
    for name, task in result["tasks"].items():
        if task.get("group") not in result["tasks"]:
            name = f"{name} (near)" if "near" in task else name
            for metric, score in task["metrics"].items():
                error = f"± {score['stderr']:.4f}" if score["stderr"] is not None else ""
                rows.append((name, metric, f"{score['value']:.4f}", error, str(task["items"])))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _score_held_out(lm, data: str | None) -> dict[str, Any]:
    if data is None:
        raise ValueError("bits per byte are those of a held-out text: name a prepared data folder with --data")
    blocks = score_held_out(lm.model, lm.tokenizer, data, lm.max_length, lm.batch_size)
    return {**asdict(bits_per_byte(blocks)), "blocks": blocks.to_dict()}


def _run_tasks(lm, tasks: dict[str, Any], limit: int | None) -> dict[str, dict[str, Any]]:
    """Each task and group by name: its items, version and metrics, the main one first."""
    if not tasks["tasks"]:
        return {}
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # lm-eval's bootstrap would start a process for each core
    from lm_eval.evaluator import evaluate as run

    from ssm_trn.evaluation.tasks import near_tasks

    outcome = run(lm, tasks, limit=limit, bootstrap_iters=1000, log_samples=False)
    near = near_tasks(tasks)
    groups = {task: group for group, members in outcome["group_subtasks"].items() for task in members}
    entries = {}
    for name, scores in outcome["results"].items():
        metrics = {}
        for key, value in scores.items():
            metric, _, variant = key.partition(",")
            if variant and not metric.endswith("_stderr"):
                error = scores.get(f"{metric}_stderr,{variant}")
                metrics[metric if variant == "none" else f"{metric} ({variant})"] = {
                    "value": value,
                    "stderr": error if isinstance(error, float) else None,
                }
        if not metrics:
            continue
        ordered = sorted(metrics, key=lambda metric: metric != "acc")
        entries[name] = {
            "items": scores["sample_len"],
            "version": outcome["versions"].get(name),
            "metrics": {metric: metrics[metric] for metric in ordered},
        }
        if name in groups:
            entries[name]["group"] = groups[name]
        if name in near:
            entries[name]["near"] = near[name]
    return entries


def _earlier(path: Path, head: dict[str, Any]) -> dict[str, Any]:
    """What an evaluation file holds already, if it is of the same model in the same setting."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a file: name another one with --output")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)  # now, so that no evaluation is lost for want of a place
        return {}
    try:
        earlier = json.loads(path.read_text())
        same = all(earlier.get(key) == value for key, value in head.items())
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a file of this command: name another one with --output") from error
    return earlier if same else {}


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """A library's logger without its warnings, which are about things that are as they should be."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
