"""The command line of papers/NAME/run.py."""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from ssm_trn.claims.claim import Claim
from ssm_trn.claims.experiment import Experiment, Job, Row
from ssm_trn.claims.rows import Results, deviations, read_rows
from ssm_trn.runtime import set_up_process


def main(claim: Claim, arguments: Sequence[str] | None = None) -> int:
    """Runs a claim's jobs that have no rows yet and writes results.csv, figure and report.

    Returns:
        0, or 2 after wrong input, told in one sentence.
    """
    try:
        return _run(claim, _parser(claim).parse_args(arguments))
    except (ValueError, OSError) as error:
        print(f"{claim.name}: error: {error}", file=sys.stderr)
        return 2


def _parser(claim: Claim) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"papers/{claim.name}/run.py", description=claim.title)
    parser.add_argument("--scale", choices=list(claim.experiments), default="cpu", help="sizes and device")
    parser.add_argument("--reduced", action="store_true", help="fewer settings, one seed, learning rates as committed")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of the claim's own; learning rates as committed")
    parser.add_argument("--output", type=Path, help="folder of runs and results (runs/papers/NAME/SCALE)")
    parser.add_argument("--record", action="store_true", help="write results into the claim's own folder")
    parser.add_argument("--processes", type=int, default=1, help="jobs at a time, each with its share of the cores")
    parser.add_argument("--list_jobs", action="store_true", help="only list what is done and to do")
    parser.add_argument("--only_report", action="store_true", help="write figure and report anew, without running")
    return parser


def _run(claim: Claim, options: argparse.Namespace) -> int:
    name = options.scale + ("-reduced" if options.reduced else "") + ("-seeds" if options.seeds else "")
    runs = options.output or Path("runs/papers") / claim.name / name
    place = claim.folder if options.record else runs
    if options.record and (options.reduced or options.seeds):
        raise ValueError("--record writes the results that others are held against: leave out --reduced and --seeds")
    if options.processes < 1:
        raise ValueError(f"--processes is {options.processes}; it must be at least 1")
    experiment = claim.experiments[options.scale]
    committed = read_rows(claim.folder / claim.results_file(options.scale))
    if options.reduced or options.seeds:
        experiment = experiment.narrowed(committed, options.seeds, options.reduced)
    rows = read_rows(place / claim.results_file(options.scale))
    rows, to_do = current(rows, experiment)
    if options.list_jobs:
        for job in experiment.jobs():
            print(f"{'to do' if job in to_do else 'done':6} {job.name}")
        return 0
    if not options.only_report:
        for found in _results(experiment, to_do, runs, rows, options.processes):
            rows.extend(found)
            claim.write(in_order(rows, experiment), options.scale, place)
    if not rows:
        raise ValueError(f"{place} has no results yet: run without --only_report")
    rows = in_order(rows, experiment)
    claim.write(rows, options.scale, place)
    print(claim.report(Results(experiment.compared(rows)), rows))
    if not options.record:
        _compare(claim, Results(experiment.compared(rows)), claim.committed(options.scale))
    return 0


def current(rows: Sequence[Row], experiment: Experiment) -> tuple[list[Row], list[Job]]:
    """The rows of jobs as they are now, and the jobs that have none: what was run with other settings is run again."""
    settings = {job.name: job.settings for job in experiment.jobs()}
    kept = [row for row in rows if settings.get(row["job"]) == row["settings"]]
    done = {row["job"] for row in kept}
    return kept, [job for job in experiment.jobs() if job.name not in done]


def in_order(rows: Sequence[Row], experiment: Experiment) -> list[Row]:
    """Rows in the order of their jobs, whichever was done first."""
    places = {job.name: place for place, job in enumerate(experiment.jobs())}
    return sorted(rows, key=lambda row: places[row["job"]])


def _results(
    experiment: Experiment, jobs: Sequence[Job], runs: Path, rows: list[Row], processes: int
) -> Iterator[list[Row]]:
    """The rows of each job as it ends; `rows`, to which the caller adds them, must have those of the tries."""
    stages = [[job for job in jobs if job.tries], [job for job in jobs if not job.tries]]
    if processes == 1:
        set_up_process()
        for job in stages[0] + stages[1]:
            yield _run_job(experiment, job, runs, rows)
        return
    threads = max(1, (os.cpu_count() or 1) // processes)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=_set_up_worker, initargs=(threads,)) as pool:
        for stage in stages:
            pending = [pool.submit(_run_job, experiment, job, runs, rows) for job in stage]
            try:
                for future in as_completed(pending):
                    yield future.result()
            except BaseException:
                for future in pending:
                    future.cancel()
                raise


def _set_up_worker(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    set_up_process()


def _run_job(experiment: Experiment, job: Job, runs: Path, rows: Sequence[Row]) -> list[Row]:
    print(f"{job.name}: begins", flush=True)
    found = experiment.run(job, runs / job.name, rows)
    print(f"{job.name}: done", flush=True)
    return [{"job": job.name, "seed": str(job.seed), "settings": job.settings} | row for row in found]


def _compare(claim: Claim, new: Results, committed: Results) -> None:
    """Prints which figures leave the committed ones by more than the tolerance."""
    found = deviations(new, committed, claim.keys, claim.value, claim.floor)
    outside = [deviation for deviation in found if not deviation.is_within]
    print(f"\n{len(found) - len(outside)} of {len(found)} figures are within tolerance of the committed ones")
    for deviation in outside:
        print(
            f"  {deviation.setting}: {deviation.value:.4g}, committed {deviation.committed:.4g} "
            f"± {deviation.tolerance:.2g}"
        )
