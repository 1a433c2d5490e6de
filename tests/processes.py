"""Processes that may end between two looks at them."""

import contextlib

import psutil


def is_alive(process):
    """Says whether a process, or the one of a number, runs and is not a zombie."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def find_children(words):
    """Returns the processes below this one whose command has these words."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found += [process] if words in " ".join(process.cmdline()) else []
    return found


def find_survivors(pids, seconds=2):
    """Returns the processes that are alive after some time: a busy machine is slow to take a killed one down."""
    running = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            running.append(psutil.Process(pid))
    return [each for each in psutil.wait_procs(running, timeout=seconds)[1] if is_alive(each)]
