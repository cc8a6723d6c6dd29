"""Episodes of scripted actions, with the checks of the real pool."""

import asyncio

from hybridrl.environments import Action, Task
from hybridrl.environments.pool import EnvironmentPool


def episodes(name, options, *scripts, seed=1, tasks=None):
    """Replies and final rewards of an episode for each script of actions, one after the other in one pool.

    A script's episode ends early when the environment says so; actions may be a function of the reply before.
    """
    async def main():
        pool = EnvironmentPool(name, options, 20.0)
        try:
            tasks_of_scripts = tasks or [Task(prompt="begin", seed=seed)] * len(scripts)
            return [await episode(pool, task, script)
                    for task, script in zip(tasks_of_scripts, scripts, strict=True)]
        finally:
            await pool.close()

    return asyncio.run(asyncio.wait_for(main(), 60))


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


def said(reply):
    """The text of a reply."""
    return "\n".join(message["content"] for message in reply.messages)
