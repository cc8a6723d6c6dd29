"""Episodes of scripted actions, with the checks of the real pool; and deadlines that wait for others."""

import asyncio

from hybridrl.environments import Action, Task
from hybridrl.environments.pool import EnvironmentPool


def episodes(name, options, *scripts, seed=1, tasks=None):
    """Replies and final rewards of an episode for each script of actions, one after the other in one pool.

    A script's episode ends early when the environment says so; actions may be a function of the reply before.
    """
    async def main():
        pool = EnvironmentPool(name, options, 60.0)
        try:
            tasks_of_scripts = tasks or [Task(prompt="begin", seed=seed)] * len(scripts)
            return [await episode(pool, task, script)
                    for task, script in zip(tasks_of_scripts, scripts, strict=True)]
        finally:
            await pool.close()

    return asyncio.run(asyncio.wait_for(main(), 170))


async def episode(pool, task, script):
    session = await pool.open()
    try:
        replies = [await session.reset(task)]
        for action in script:
            replies.append(await session.step(Action(action(replies[-1]) if callable(action) else action)))
            if replies[-1].done:
                break
        return replies, await session.verify("done" if replies[-1].done else "max_turns")
    finally:
        await pool.release(session)


def deadlines_after(runner, episodes):
    """The clock of a runner's deadlines stands until so many episodes have ended; then an hour has passed.

    So an episode that hangs misses its deadline, and no other does because the machine is slow.
    """
    loop, release, ended = runner._loop, runner._pool.release, []
    real, stands_at = loop.time, loop.time()

    async def counted(session):
        await release(session)
        ended.append(session)

    runner._pool.release = counted
    loop.time = lambda: stands_at if len(ended) < episodes else real() + 3600


def said(reply):
    """The text of a reply."""
    return "\n".join(message["content"] for message in reply.messages)
