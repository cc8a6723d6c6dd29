"""Environments that do what the task's data says, at the point it says: every fault that an episode must survive."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time

from hybridrl.environments import AsyncEnvironment, Environment, Step


class Unprintable:
    """Not JSON, and hostile to whoever looks at it."""

    def __repr__(self):
        raise RuntimeError("no repr")


def misbehave(fault):
    """Do what `fault` names; returns what to return in place of an observation."""
    if fault == "raise":
        raise ValueError("asked to\nraise")
    if fault == "exit":
        sys.exit("asked to exit")
    if fault == "die":
        os._exit(3)
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "hang":
        time.sleep(3600)
    if fault == "hang_with_child":
        subprocess.Popen(["sleep", "3600"])
        time.sleep(3600)
    values = {"number": 7, "object": Unprintable(), "long": "x" * 10_000_000, "surrogate": "half \ud800",
              "assistant": [{"role": "assistant", "content": "I"}], "bytes": b"\xff\xfe"}
    return values[fault]


class Scripted(Environment):
    """`turns` turns; `fault` happens in `where` (build, reset, step, verify) of each episode that names one."""

    def __init__(self, delay_s: float = 0.0):
        self.delay_s = delay_s

    def reset(self, task):
        self.data, self.count = task.data or {}, 0
        if self.data.get("where") == "reset":
            return misbehave(self.data["fault"])
        return f"begin {os.getpid()}" if self.data.get("pid") else "begin"

    def step(self, action):
        time.sleep(self.delay_s)
        self.count += 1
        if self.data.get("fork") == self.count:
            os.fork()
        if self.data.get("where") == "step" and self.count == self.data.get("at", 1):
            return Step(misbehave(self.data["fault"]))
        return Step(f"turn {self.count}", 0.5, self.count >= self.data.get("turns", 2), {"count": self.count})

    def verify(self, trajectory):
        if self.data.get("where") == "verify":
            return {"nan": float("nan"), "text": "1"}.get(self.data["fault"]) or misbehave(self.data["fault"])
        return float(len(trajectory.turns))


class Broken(Environment):
    """Can't be built."""

    def __init__(self):
        raise OSError("no such service")


class Waiting(AsyncEnvironment):
    """A service on the network, as coroutines."""

    async def reset(self, task):
        self.data, self.count = task.data or {}, 0
        return "begin"

    async def step(self, action):
        self.count += 1
        if self.data.get("fault") == "raise":
            raise ValueError("asked to")
        if self.data.get("fault") == "hang":
            await asyncio.sleep(3600)
        if self.data.get("fault") == "exit":
            sys.exit("asked to exit")
        if self.data.get("fault") == "cancelled":
            raise asyncio.CancelledError
        while self.data.get("fault") == "stay":
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(self.data["released"].is_set() or 0.05)
            if self.data["released"].is_set():
                break
        await asyncio.sleep(0.001)
        return f"turn {self.count}", 0.5, self.count >= 2, {}

    async def verify(self, trajectory):
        return 1.0
