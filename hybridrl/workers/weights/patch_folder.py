"""Weight patches in a shared folder: one sender, any number of receivers that come and go.

    000000007.full      the state at version 7
    000000008.patch     from version 7 to 8
    000000009.patch
    NEWEST              version and digest that the files lead to; a version is published when this names it
    WANTED              a receiver met a damaged or missing file: the next version comes as a full state too

Files are written aside, synced to the disk and renamed; NEWEST comes last. A receiver that holds a version replays the
patches after it; one that holds none, or that a patch refuses, takes the newest full state and replays from there.
"""

import json
import os
from contextlib import suppress
from pathlib import Path

from hybridrl.errors import ConfigError, PatchError, SyncError
from hybridrl.workers.weights.patch import State
from hybridrl.workers.weights.patch_chain import Named, PatchReceiver, PatchSender
from hybridrl.workers.weights.patch_codec import states_of

NEWEST, WANTED = "NEWEST", "WANTED"


class PatchFolder:
    """A folder that weights are published in, for its sender and for its receivers.

    Args:
        path: the folder; made when it is missing.
        full_every: versions between full states, which bounds what a late receiver replays.
    Raises:
        ConfigError: full_every below 1. SyncError: the folder can't be made.
    """

    def __init__(self, path: str | Path, full_every: int = 20):
        self.path = Path(path)
        self.full_every = full_every
        if full_every < 1:
            raise ConfigError(f"full_every must be at least 1, got {full_every}.")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SyncError(f"can't make the folder {self.path} for weight patches: {error}.") from error

    # ---- the sender

    def publish(self, sender: PatchSender, weights: Named, version: int) -> int:
        """Publish `weights` as `version`, and acknowledge it to the sender: receivers take it from the folder.

        A sender that has published nothing yet takes the folder over, so that one can be restarted.
        Returns the bytes written. Raises SyncError when the folder can't be written, or when another sender has
        published in it since this one did; then nothing is published.
        """
        self._check_chain(sender)
        weights = list(weights)
        data = sender.encode(weights, version)
        alone = states_of(data)[0] is None
        kinds = {"full" if alone else "patch": data}
        if not alone and self._full_is_due():
            kinds["full"] = sender.full(weights, version)
        written: list[Path] = []
        try:
            for kind, contents in kinds.items():
                written.append(self._write(f"{version:09d}.{kind}", contents))
            result = states_of(data)[1]
            self._write(NEWEST, json.dumps([result.version, result.digest]).encode())
        except OSError as error:
            for file in written:  # or a later version's receivers would take it for a part of the chain
                with suppress(OSError):
                    file.unlink()
            raise SyncError(f"can't publish weights in {self.path}: {error}.") from error
        sender.acknowledge(version)
        if "full" in kinds:
            self._clean(version, alone)
        return sum(map(len, kinds.values()))

    def _check_chain(self, sender: PatchSender) -> None:
        newest = None
        with suppress(SyncError):  # a damaged marker is written anew
            newest = self.newest()
        if sender.state is not None and newest not in (None, sender.state):
            raise SyncError(f"can't publish weights in {self.path}: version {newest.version} there is from another "
                            f"sender, this one's last was {sender.state.version}. Each needs a folder of its own.")

    def _write(self, name: str, data: bytes) -> Path:
        aside = self.path / f".{name}.part"
        try:
            with aside.open("wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            aside.rename(self.path / name)
        finally:
            aside.unlink(missing_ok=True)  # half a file on a full disk
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return self.path / name

    def _full_is_due(self) -> bool:
        newest = max(self._versions("full"), default=-1)
        replayed = sum(version > newest for version in self._versions("patch"))
        return replayed + 1 >= self.full_every or (self.path / WANTED).exists()

    def _clean(self, version: int, alone: bool) -> None:
        """Drop what nobody needs once `version` is there as a full state.

        Its patch stays, and those since the full state before it: receivers on their way read them. A full state
        `alone` begins a chain, and all other files are of one that has ended.
        """
        for file in (self.path / WANTED, *self.path.glob(".*.part")):  # the latter of senders that were killed
            file.unlink(missing_ok=True)
        before = max((other for other in self._versions("full") if other < version), default=-1)
        for kind in ("full", "patch"):
            for other in self._versions(kind):
                if alone or kind == "full" or other <= before:
                    if (kind, other) != ("full", version):
                        self._file(other, kind).unlink(missing_ok=True)

    # ---- receivers

    def newest(self) -> State | None:
        """The state published last; None before the first."""
        try:
            version, digest = json.loads((self.path / NEWEST).read_bytes())
            return State(int(version), str(digest))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise SyncError(f"can't read {self.path / NEWEST}: {error}.") from error

    def update(self, receiver: PatchReceiver) -> bool:
        """Bring a receiver to the newest published state; False when it is there already, or there is none.

        Raises SyncError when files are missing or refused; the sender then sees that a full state is wanted.
        """
        newest = self.newest()
        if newest is None or receiver.state == newest:
            return False
        if receiver.state is not None and receiver.state.version < newest.version:
            with suppress(PatchError, OSError):  # a full state repairs it
                self._replay(receiver, newest)
                return True
        try:
            self._restart(receiver, newest)
        except (PatchError, OSError) as error:
            if self.newest() != newest:  # the sender went on meanwhile, and dropped files
                return self.update(receiver)
            with suppress(OSError):  # a receiver may be without the right to write
                self._write(WANTED, b"")
            raise SyncError(f"the files in {self.path} don't lead to version {newest.version}, a full state is wanted: "
                            f"{error}") from error
        return True

    def _replay(self, receiver: PatchReceiver, newest: State) -> None:
        held = -1 if receiver.state is None else receiver.state.version
        for version in self._versions("patch"):
            if held < version <= newest.version:
                receiver.apply(self._file(version, "patch").read_bytes())
        if receiver.state != newest:
            raise FileNotFoundError(f"no patch that leads to version {newest.version}")

    def _restart(self, receiver: PatchReceiver, newest: State) -> None:
        fulls = [version for version in self._versions("full") if version <= newest.version]
        if not fulls:
            raise FileNotFoundError("no full state")
        receiver.forget()
        receiver.apply(self._file(fulls[-1], "full").read_bytes())
        self._replay(receiver, newest)

    def _versions(self, kind: str) -> list[int]:
        return sorted(int(file.stem) for file in self.path.glob(f"*.{kind}")
                      if file.stem.isascii() and file.stem.isdigit())

    def _file(self, version: int, kind: str) -> Path:
        return self.path / f"{version:09d}.{kind}"

