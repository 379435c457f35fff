"""Documents to ids in several processes. Ids and their order do not depend on how many there are."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

from ssm_trn.data.tokenizer import Tokenizer

_BATCH_CHARACTERS = 2**20  # text that is encoded at once

Encoded = tuple[np.ndarray, int]

_tokenizer: Tokenizer  # of a worker process


def encoded(documents: Iterable[str], tokenizer_file: Path, processes: int = 1) -> Iterator[Encoded]:
    """The ids (int32 [tokens], without BOS and EOS) and the UTF-8 bytes of each document, in order.

    Of the documents some two batches a process are in memory at once. With one process the work is done in this one,
    on all its cores where sentencepiece uses them.

    Raises:
        ValueError: UTF-8 cannot hold a document, or a process was killed.
        RuntimeError: a document does not come back from its ids.
    """
    batches = _batches(documents)
    if processes == 1:
        tokenizer = Tokenizer.load(tokenizer_file)
        for first, texts in batches:
            yield from _encode(tokenizer, first, texts, -1)
        return
    context = multiprocessing.get_context("forkserver")  # a fork of this process would share its threads' locks
    context.set_forkserver_preload([__name__])
    pool = ProcessPoolExecutor(processes, context, _start_worker, (tokenizer_file,))
    try:
        waiting = deque()
        for first, texts in batches:
            waiting.append(pool.submit(_encode_in_worker, first, texts))
            if len(waiting) >= 2 * processes:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    except BrokenProcessPool as error:
        raise ValueError("a process that encodes was killed, perhaps as memory ran out: ask for fewer") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(documents: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Documents in batches, each with the number of its first one."""
    first, batch, size = 0, [], 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= _BATCH_CHARACTERS:
            yield first, batch
            first, batch, size = first + len(batch), [], 0
    if batch:
        yield first, batch


def _encode(tokenizer: Tokenizer, first: int, texts: list[str], threads: int) -> list[Encoded]:
    result = []
    for index, (text, ids) in enumerate(zip(texts, tokenizer.encode_batch(texts, threads), strict=True), first):
        content = text.encode()
        if tokenizer.decode_bytes(ids) != content:
            raise RuntimeError(f"document {index} does not come back from its tokens: please report this")
        result.append((np.array(ids, dtype=np.int32), len(content)))
    return result


def _start_worker(tokenizer_file: Path) -> None:
    global _tokenizer
    _tokenizer = Tokenizer.load(tokenizer_file)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the main process ends the others
    threading.Thread(target=_end_with_main_process, daemon=True).start()


def _end_with_main_process() -> None:
    """Else the workers of a process that was killed would wait for batches for ever."""
    main = multiprocessing.parent_process()
    assert main is not None
    main.join()
    os._exit(1)


def _encode_in_worker(first: int, texts: list[str]) -> list[Encoded]:
    return _encode(_tokenizer, first, texts, 1)
