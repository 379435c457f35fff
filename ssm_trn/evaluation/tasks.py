"""The tasks that a model can be tested on: lm-eval's own, with data from files or from the hub, and the package's.

Without a network there are the tasks whose data are in a folder of benchmark files (benchmarks.py), and those in
`task_files/`, which need no download: any YAML file of lm-eval's format in there is a task.
"""

import difflib
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import lm_eval.tasks
from jinja2 import UndefinedError
from lm_eval.tasks._factory import TaskFactory
from lm_eval.tasks._index import Entry, Kind

from ssm_trn.evaluation.benchmarks import (
    BENCHMARKS_VARIABLE,
    NEAR,
    benchmarks_folder,
    local_source,
    missing_files,
    needed_files,
)

logger = logging.getLogger(__name__)
_TASK_FILES = Path(__file__).with_name("task_files")
_OFFICIAL = Path(lm_eval.tasks.__file__).parent
# Where lm-eval defines the tasks whose data may come from files, and the recall tasks in cloze form that need the hub
# (Arora et al. 2024, arXiv:2402.18668). To read all its 14,000 definitions takes 10 seconds.
_FOLDERS = ["arc", "blimp", "crows_pairs", "gsm8k", "lambada", "piqa", "super_glue", "wikitext", "winogrande", "xcopa"]
_FOLDERS += ["fda", "squad_completion", "swde"]


class Tasks(lm_eval.tasks.TaskManager):
    """lm-eval's manager of tasks, which knows the package's tasks too and takes data from files where there are any.

    Args:
        include_path: folder with further task definitions, or several.
        include_defaults: all tasks of lm-eval are known, else those whose data may come from files. The definitions of
            all are read when one of the others is asked for.
        metadata: what tasks of the package are told: data (prepared data folder), pretrained (run folder), ...
        benchmarks: folder of benchmark files.
        online: data that are not in files may come from the Hugging Face hub.
    """

    def __init__(
        self,
        include_path: str | Path | Sequence[str | Path] | None = None,
        include_defaults: bool = True,
        metadata: Mapping[str, Any] | None = None,
        *,
        benchmarks: Path | None = None,
        online: bool = False,
    ):
        self._paths = [_TASK_FILES, *([include_path] if isinstance(include_path, str | Path) else include_path or [])]
        self._benchmarks, self._online = benchmarks, online
        self._include_defaults, self._all_read = include_defaults, False
        self._read([_OFFICIAL / folder for folder in _FOLDERS], False, dict(metadata or {}))

    def _read(self, official: Sequence[Path], include_defaults: bool, metadata: dict[str, Any]) -> None:
        super().__init__(include_path=[*official, *self._paths], include_defaults=include_defaults, metadata=metadata)
        self._factory = _Factory(metadata, self._benchmarks, self._online)

    def _read_all(self) -> None:
        if self._include_defaults and not self._all_read:
            self._all_read = True
            self._read([], True, self.metadata)

    def load(self, names):
        """The tasks of these names, ready for `lm_eval.evaluate`.

        Raises:
            ValueError: for an unknown task, or one whose data are out of reach.
            FileNotFoundError: if the benchmarks folder lacks files; all of them are named.
        """
        names = names if isinstance(names, list) else [names]
        names = [self._of_tag(name) if isinstance(name, str) and not Path(name).is_file() else [name] for name in names]
        names = list(chain.from_iterable(names))
        leaves = {leaf.name: leaf.cfg for name in names if isinstance(name, str) for leaf in self._leaves(name)}
        if self._benchmarks is not None and not self._online:
            missing = {file for definition in leaves.values() for file in missing_files(definition, self._benchmarks)}
            if missing:
                first, *others = sorted(missing)
                more = f" and {len(others)} more" if others else ""
                raise FileNotFoundError(
                    f"{self._benchmarks} lacks files of the tasks asked for, {first}{more}: put them there, name "
                    "another folder with --benchmarks, or see `ssm-trn benchmarks` for what is there"
                )
        loaded = super().load(names)
        reasons = near_tasks(loaded)
        for reason in sorted({*reasons.values()}):
            near = [name for name in reasons if reasons[name] == reason]
            logger.warning("near lm-eval's task, not equal to it: %s (%s)", _shortened(near), reason)
        return loaded

    def match_tasks(self, task_list: list[str]) -> list[str]:
        """The names that fit these names and patterns. Raises ValueError for one that nothing fits."""
        if not all(name in self.task_index for name in task_list):
            self._read_all()
        for name in task_list:
            if not super().match_tasks([name]):
                raise ValueError(_unknown(name, self.all_tasks, self._include_defaults))
        return super().match_tasks(task_list)

    def list_all_tasks(self, *args, **kwargs) -> str:
        """A table of all tasks."""
        self._read_all()
        return super().list_all_tasks(*args, **kwargs)

    def _of_tag(self, name: str) -> list[str]:
        """The name itself, or the tasks of a tag: without the hub, those whose data are here."""
        self.match_tasks([name])
        entry = self.task_index.get(name)
        if entry is None or entry.kind is not Kind.TAG:
            return [name]
        tasks = sorted(entry.tags)
        here = [task for task in tasks if self._online or _is_here(self.task_index[task], self._benchmarks)]
        if left_out := [task for task in tasks if task not in here]:
            logger.warning("of %s these need the hub and are left out: %s", name, _shortened(left_out))
        return here or tasks

    def _leaves(self, name: str) -> Iterator[Entry]:
        """The single tasks that a name stands for."""
        entry = self.task_index.get(name)
        if entry is None:
            return
        if entry.kind not in (Kind.GROUP, Kind.TAG):
            yield entry
            return
        members = entry.tags if entry.kind is Kind.TAG else entry.cfg.get("task") or []
        for member in [members] if isinstance(members, str) else members:
            yield from self._leaves(member if isinstance(member, str) else member.get("task") or member["group"])


class _Factory(TaskFactory):
    """Makes tasks from their definitions, and replaces where their data come from."""

    def __init__(self, metadata: Mapping[str, Any] | None, benchmarks: Path | None, online: bool):
        super().__init__(meta=dict(metadata or {}))
        self._benchmarks, self._online = benchmarks, online

    def _build_task(self, entry: Entry, overrides: dict[str, Any] | None):
        definition = {**(entry.cfg or {}), **(overrides or {})}
        local = local_source(definition, self._benchmarks)
        if not local and not self._online and _is_official(entry) and "custom_dataset" not in definition:
            raise ValueError(_out_of_reach(entry.name, definition))
        made_here = bool(local) or "custom_dataset" in definition
        logging.getLogger("lm_eval.api.task").disabled = made_here  # it explains how to pass options to such data
        try:
            return super()._build_task(entry, {**(overrides or {}), **local})
        except (UndefinedError, KeyError, IndexError) as error:  # lm-eval makes a question of the first item here
            if not local:
                raise
            raise ValueError(
                f"a file in {self._benchmarks} lacks what task '{entry.name}' needs ({error}): get it anew"
            ) from error
        except ConnectionError as error:
            mend = "check the network" if self._online else "allow that with --online"
            raise ValueError(f"task '{entry.name}' reads its data from the network ({error}): {mend}") from error
        except ImportError as error:
            raise ValueError(
                f"task '{entry.name}' needs a package that is not installed, or not in this version ({error}): "
                "install it, or leave the task out"
            ) from error
        finally:
            logging.getLogger("lm_eval.api.task").disabled = False


def load_tasks(
    names: Sequence[str],
    *,
    data: str | Path | None = None,
    benchmarks: str | Path | None = None,
    online: bool = False,
    pretrained: str | Path | None = None,
) -> dict:
    """Tasks by name, for `lm_eval.evaluate`.

    Args:
        names: of tasks of the package and of lm-eval.
        data: prepared data folder whose held-out documents the package's tasks are made from.
        benchmarks: folder with the files of lm-eval's tasks, as `ssm-trn benchmarks` lists them; by default the
            environment variable SSM_TRN_BENCHMARKS.
        online: allow all tasks of lm-eval, with data from the Hugging Face hub where the folder has no file.
        pretrained: run folder of the model, for tasks that are made for its tokenizer.

    Raises:
        ValueError: for an unknown task, or where a task needs a folder that is not given.
        FileNotFoundError: if the benchmarks folder lacks the file of a task.
    """
    metadata = {"data": data, "pretrained": pretrained}
    manager = Tasks(
        include_defaults=online,
        metadata={name: str(value) for name, value in metadata.items() if value is not None},
        benchmarks=benchmarks_folder(benchmarks),
        online=online,
    )
    return manager.load(list(names))


def near_tasks(loaded: Mapping[str, Any]) -> dict[str, str]:
    """Of loaded tasks, those whose data come from files that are not the hub's to the letter, and why."""
    configs = {name: task.config for name, task in loaded["tasks"].items()}
    return {
        name: NEAR[config.dataset_path]
        for name, config in configs.items()
        if config.custom_dataset is not None and config.dataset_path in NEAR
    }


def benchmarks(folder: str | None = None) -> None:
    """Lists the tasks that need no network, with the benchmark files that a folder has and lacks.

    Args:
        folder: Folder of benchmark files; by default the variable SSM_TRN_BENCHMARKS names it.
    """
    print(benchmarks_table(benchmarks_folder(folder)))


def benchmarks_table(folder: Path | None) -> str:
    """What `benchmarks` prints: a line for each set of files, the tasks that read them, and what is near or missing."""
    index = Tasks(include_defaults=False).task_index
    readers = defaultdict(list)  # tasks by the data that they read; None: those that need no file
    for name, entry in index.items():
        if entry.kind in (Kind.TASK, Kind.PY_TASK) and (needed_files(entry.cfg) or not _is_official(entry)):
            readers[entry.cfg.get("dataset_path") if needed_files(entry.cfg) else None].append(name)
    lines = [f"no file needed: {', '.join(sorted(readers.pop(None, [])))}"]
    for data_set, names in sorted(readers.items()):
        files = {file for name in names for file in needed_files(index[name].cfg).values()}
        absent = sorted(file for file in files if folder is None or not (folder / file).is_file())
        found = f"{len(files) - len(absent)} of {len(files)} files"
        groups = [entry for entry in index.values() if entry.kind is Kind.GROUP and {*entry.cfg["task"]} <= {*names}]
        for group in groups:
            names = [group.name, *(name for name in names if name not in group.cfg["task"])]
        lines.append(f"{data_set}: {found}; for {_shortened(sorted(names))}")
        if absent and folder is not None:
            lines.append(f"    missing: {_shortened(absent)}")
        if data_set in NEAR:
            lines.append(f"    near, not equal: {NEAR[data_set]}")
    if folder is None:
        lines.append(f"no folder of benchmark files is named: give it to this command, or set {BENCHMARKS_VARIABLE}")
    return "\n".join(lines)


def _shortened(names: Sequence[str]) -> str:
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return ", ".join(names[:12]) + more


def _is_here(entry: Entry, benchmarks: Path | None) -> bool:
    """Whether a task can be had without the hub."""
    return not _is_official(entry) or bool(local_source(entry.cfg, benchmarks))


def _is_official(entry: Entry) -> bool:
    return entry.yaml_path is not None and entry.yaml_path.is_relative_to(_OFFICIAL)


def _out_of_reach(name: str, definition: Mapping[str, Any]) -> str:
    """Why a task of lm-eval cannot be had without a network, and what mends that."""
    if needed_files(definition):
        return (
            f"task '{name}' needs its data file: name a folder of benchmark files with --benchmarks or "
            f"{BENCHMARKS_VARIABLE}, or allow the hub with --online"
        )
    source = f"the data set {path} of" if (path := definition.get("dataset_path")) else "data of"
    return f"task '{name}' needs {source} the Hugging Face hub: allow that with --online, where there is a network"


def _unknown(name: str, known: Sequence[str], all_known: bool) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    if all_known:
        return f"unknown task '{name}'{hint}: `ssm-trn lm-eval ls tasks` lists all"
    return (
        f"unknown task '{name}'{hint}, or one that needs the Hugging Face hub: `ssm-trn benchmarks` lists those that "
        "do not, --online allows all of lm-eval's"
    )
