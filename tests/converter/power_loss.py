"""A disk that forgets: what a power loss may leave of the files below a folder, at any moment of a run in this process.

What a program was promised is the content of a file at its last fsync, and the entries of a directory at its last fsync. Everything else
may or may not have reached the disk. Three extremes are made at each moment: "eager", every rename and removal is there and no byte that
was not flushed; "lazy", no rename and no removal is there whose directory was not flushed; "mixed", only those in `root` are not.
"""

import os
import stat
from pathlib import Path


class Disk:
    """Follows what `os` is asked to do below `root`; `crashed(kind, at)` lists what a loss after operation `at` leaves.

    chosen: numbers of the operations after which states are kept.
    """

    FOLLOWED = ("fsync", "replace", "rename", "unlink", "remove", "mkdir", "rmdir", "link")

    def __init__(self, root, chosen, monkeypatch):
        self.root, self.chosen, self.operations = root, set(chosen), 0
        self.states = {}  # (operation, kind) -> {relative path: bytes, None for a directory}
        self._ids, self._next = {}, 0  # (device, inode) -> number: an inode may be used again for another file
        self.contents, self._entries = {}, {}  # number -> bytes; number of a directory -> {name: number}
        self._directories = set()
        self.flush_directory(root)
        for name in self.FOLLOWED:
            monkeypatch.setattr(os, name, self._followed(name, getattr(os, name)))

    def _followed(self, name, real):
        def call(*args, **kwargs):
            gone = self._gone(name, args, kwargs)
            done = real(*args, **kwargs)
            if gone is not None:
                self._ids.pop(gone, None)
            if name == "fsync":
                self._flush(args[0])
            self.operations += 1
            if self.operations in self.chosen:
                self.states[self.operations, "eager"] = self._eager()
                self.states[self.operations, "lazy"] = self._lazy(self._entries)
                self.states[self.operations, "mixed"] = self._lazy(self._now())
            return done

        return call

    def _gone(self, name, args, kwargs):
        """The inode that loses its name by this call."""
        place = args[1] if name in ("replace", "rename") else args[0] if name in ("unlink", "remove", "rmdir") else None
        try:
            found = os.stat(place, dir_fd=kwargs.get("dir_fd"), follow_symlinks=False) if place is not None else None
        except OSError:
            return None
        return None if found is None else (found.st_dev, found.st_ino)

    def number_of(self, path):
        found = os.stat(path)
        key = found.st_dev, found.st_ino
        if key not in self._ids:
            self._next += 1
            self._ids[key] = self._next
            if stat.S_ISDIR(found.st_mode):
                self._directories.add(self._next)
        return self._ids[key]

    def _flush(self, descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if self.root not in (path, *path.parents):
            return
        if path.is_dir():
            self.flush_directory(path)
        else:
            self.contents[self.number_of(path)] = path.read_bytes()

    def flush_directory(self, path):
        self._entries[self.number_of(path)] = {entry.name: self.number_of(entry.path) for entry in os.scandir(path)}

    def _eager(self):
        return {
            str(path.relative_to(self.root)): None if path.is_dir() else self.contents.get(self.number_of(path), b"")
            for path in sorted(self.root.rglob("*"))
        }

    def _now(self):
        below = [path for path in self.root.rglob("*") if path.is_dir()]
        return {self.number_of(path): {entry.name: self.number_of(entry.path) for entry in os.scandir(path)} for path in below}

    def _lazy(self, entries):
        """entries: of the directories below `root`; its own are those of its last flush."""
        made = {}

        def visit(directory, prefix):
            for name, number in held.get(directory, {}).items():
                inside = number in self._directories
                made[prefix + name] = None if inside else self.contents.get(number, b"")
                if inside:
                    visit(number, f"{prefix}{name}/")

        root = self.number_of(self.root)
        held = {**entries, root: self._entries[root]}
        visit(root, "")
        return made


def put(state, folder):
    """Make the files of a state."""
    folder.mkdir(parents=True)
    for name, content in state.items():
        if content is None:
            (folder / name).mkdir(exist_ok=True)
        else:
            (folder / name).write_bytes(content)
