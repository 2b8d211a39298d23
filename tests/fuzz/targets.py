"""What is fuzzed: each target makes good inputs once, and takes mutated ones; only this package's errors may come out.

A target is a class with `make(folder)`, `seeds` (good inputs), `mutate` and `take(content)`; `take` puts the content
where it is read from and reads it.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import socket
import subprocess
import sys
import threading
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import load_file, save_file

import kronecell as kc
from kronecell.compress.statefile import read_model
from kronecell.data import Loader, Store, open_store
from kronecell.data.video import Limits
from kronecell.report import load_runs
from kronecell.report.explore import Server
from kronecell.training.experiment import load_experiment
from kronecell.training.run import run
from tests.data.videos import pictures, write_video
from tests.fuzz import mutate
from tests.training_cases import make_store, tiny

RUN = Path("tiny") / "fold0-seed0"
SHORT = {"epochs": 1, "hidden": 16}


class Target:
    """One reader of one kind of file."""

    name: ClassVar[str]
    seeds: list[bytes]

    def make(self, folder: Path) -> None:
        """Good inputs, and whatever lies beside them."""

    def mutate(self, chance: random.Random) -> bytes:
        """A bad input."""
        return mutate.octets(chance, chance.choice(self.seeds))

    def take(self, content: bytes) -> None:
        """Read it; raises nothing but KronecellError."""

    def close(self) -> None:
        """Release what `make` holds."""


class SavedConfig(Target):
    name = "config"

    def make(self, folder: Path) -> None:
        torch.manual_seed(0)
        modules = [
            kc.TensorLinear("kcp:m=3x4x2,n=2x4x2,K=2,CA=2x1,CB=1x2", gates=2, shared=("A1", "B2"), bias=False),
            kc.TensorLinear("tt:m=3x4,n=2x4,r=2", order=(("x", "G2"), "G1")),
            kc.LSTM(24, 16, 2, bidirectional=True, proj_size=4, input_format=["kcp:K=2,CA=2,CB=2", None]),
            kc.GRU(23, 16, input_format="tt:r=2", pad_input=True, forget_bias=None),
            kc.quantize(kc.GRU(24, 16, input_format="tt:r=2"), bits=8),
            kc.LSTMCell(24, 16, hidden_format="lowrank:r=2"),
        ]
        self.folders = [kc.save(module, folder / str(i)) for i, module in enumerate(modules)]
        self.seeds = [(f / "config.json").read_bytes() for f in self.folders]
        self.tensors = [load_file(f / "model.safetensors") for f in self.folders]
        self.target = folder / "mutated"
        self.target.mkdir()

    def mutate(self, chance: random.Random) -> bytes:
        return mutate.document(chance, chance.choice(self.seeds))

    def take(self, content: bytes) -> None:
        (self.target / "config.json").write_bytes(content)
        # Tensors of a seed with as many of the same names as there are, and they say that they belong to it.
        shared = [sum(f'"{name}"'.encode() in content for name in tensors) for tensors in self.tensors]
        number = shared.index(max(shared))
        digest = hashlib.sha256(content.replace(b"\r\n", b"\n")).hexdigest()
        save_file(self.tensors[number], self.target / "model.safetensors", {"config_sha256": digest})
        kc.load(self.target)


class SavedTensors(SavedConfig):
    name = "tensors"

    def make(self, folder: Path) -> None:
        super().make(folder)
        self.seeds = [(f / "model.safetensors").read_bytes() for f in self.folders]
        shutil.copy(self.folders[0] / "config.json", self.target)

    def mutate(self, chance: random.Random) -> bytes:
        content = self.seeds[0]
        size = 8 + int.from_bytes(content[:8], "little")
        if chance.random() < 0.5:  # the header, as a document, with a length that fits
            header = mutate.document(chance, content[8:size])
            return len(header).to_bytes(8, "little") + header + content[size:]
        return mutate.octets(chance, content)

    def take(self, content: bytes) -> None:
        (self.target / "model.safetensors").write_bytes(content)
        kc.load(self.target)


class StateFile(SavedTensors):
    name = "state"

    def make(self, folder: Path) -> None:
        super().make(folder)
        model = torch.nn.ModuleDict({"rnn": torch.nn.LSTM(4, 3), "head": torch.nn.Linear(3, 2)})
        save_file(model.state_dict(), folder / "plain.safetensors")
        self.seeds = [(folder / "plain.safetensors").read_bytes()]
        self.file = folder / "mutated.safetensors"

    def take(self, content: bytes) -> None:
        self.file.write_bytes(content)
        read_model(self.file)


class RunFile(Target):
    """A file of a run whose training is done; without its result it has to be resumed."""

    file: ClassVar[str]
    finished: ClassVar[bool] = False

    def make(self, folder: Path) -> None:
        self.store: Store = make_store(folder)
        self.out, self.whole = folder / "out", folder / "whole"
        self.experiment = tiny(**SHORT)
        run(self.experiment, self.store, self.out, show=False)
        shutil.copytree(self.out / RUN, self.whole)
        self.seeds = [self.found().read_bytes()]

    def found(self) -> Path:
        return next((self.out / RUN).glob(self.file))

    def mutate(self, chance: random.Random) -> bytes:
        return mutate.document(chance, self.seeds[0])

    def take(self, content: bytes) -> None:
        shutil.rmtree(self.out)
        shutil.copytree(self.whole, self.out / RUN)
        if not self.finished:
            (self.out / RUN / "result.json").unlink()
        self.found().write_bytes(content)
        self.read()

    def read(self) -> None:
        run(self.experiment, self.store, self.out, show=False)


class Record(RunFile):
    name = "checkpoint"
    file = "checkpoint.json"

    def take(self, content: bytes) -> None:
        try:
            record = json.loads(content)
            record.pop("record_sha256", None)  # what somebody does who means harm
            content = json.dumps(record).encode()
        except (ValueError, AttributeError, RecursionError, TypeError):
            pass
        super().take(content)


class CheckpointTensors(RunFile):
    name = "checkpoint-tensors"
    file = "checkpoint-*.safetensors"

    def make(self, folder: Path) -> None:
        super().make(folder)
        record = json.loads((self.whole / "checkpoint.json").read_text())
        del record["record_sha256"], record["tensors_sha256"]
        (self.whole / "checkpoint.json").write_text(json.dumps(record))
        self.size = 8 + int.from_bytes(self.seeds[0][:8], "little")

    def mutate(self, chance: random.Random) -> bytes:
        content = self.seeds[0]
        if chance.random() < 0.6:
            header = json.loads(content[8 : self.size])
            header.get("__metadata__", {}).pop("data_sha256", None)
            text = json.dumps(mutate.json_values(chance, header)).encode()
            return len(text).to_bytes(8, "little") + text + content[self.size :]
        return mutate.octets(chance, content)


class Status(RunFile):
    name = "status"
    file = "status.json"


class Result(RunFile):
    name = "result"
    file = "result.json"
    finished = True


class Description(RunFile):
    name = "model"
    file = "model.json"
    finished = True

    def read(self) -> None:
        kc.load(self.out / RUN)


class Settings(RunFile):
    name = "settings"
    file = "config.toml"

    def mutate(self, chance: random.Random) -> bytes:
        lines = self.seeds[0].splitlines()
        at = chance.randrange(len(lines))
        if chance.random() < 0.5:
            value = chance.choice(mutate.STRANGE)
            lines[at] = lines[at].partition(b"=")[0] + b"= " + json.dumps(value).encode()
            return b"\n".join(lines)
        return mutate.octets(chance, self.seeds[0])

    def read(self) -> None:
        load_experiment(str(self.found()))
        run(self.experiment, self.store, self.out, show=False)


class Reported(RunFile):
    """Any file of a run, as the report reads it."""

    name = "report"
    file = "metrics.jsonl"
    finished = True

    def read(self) -> None:
        load_runs([self.out])

    def mutate(self, chance: random.Random) -> bytes:
        return mutate.octets(chance, self.seeds[0])


class Manifest(Target):
    name = "manifest"

    def make(self, folder: Path) -> None:
        self.root = make_store(folder).root
        self.seeds = [(self.root / "manifest.json").read_bytes()]

    def mutate(self, chance: random.Random) -> bytes:
        return mutate.document(chance, self.seeds[0])

    def take(self, content: bytes) -> None:
        (self.root / "manifest.json").write_bytes(content)
        store = open_store(self.root)
        for batch in Loader(store, range(min(len(store), 4)), 2, 0, workers=0):
            assert len(batch) == 2


class StoredClip(Manifest):
    name = "clip"

    def make(self, folder: Path) -> None:
        super().make(folder)
        store = open_store(self.root)
        self.path = self.root / "clips" / store.files[0]
        self.seeds = [self.path.read_bytes()]

    def mutate(self, chance: random.Random) -> bytes:
        content = self.seeds[0]
        if chance.random() < 0.6:
            header = mutate.document(chance, content[16:4096].rstrip())
            return content[:16] + header.ljust(4080) + content[4096:]
        return mutate.octets(chance, content)

    def take(self, content: bytes) -> None:
        self.path.write_bytes(content)
        store = open_store(self.root)
        for batch in Loader(store, [0, 1], 2, 0, workers=0):
            assert len(batch) == 2
        store.frames(0)


class Clip(Target):
    name = "video"

    def make(self, folder: Path) -> None:
        kinds = {"avi": "mpeg4", "mp4": "mpeg4", "mkv": "mjpeg", "mpg": "mpeg2video"}
        self.seeds = []
        for suffix, codec in kinds.items():
            path = folder / f"clip.{suffix}"
            write_video(path, pictures(6), codec, "yuvj420p" if codec == "mjpeg" else "yuv420p")
            self.seeds.append(path.read_bytes())
        self.path = folder / "mutated.mp4"
        # A decoding process, as `prepare` has them: a crash of the decoder must not end the test.
        program = "from kronecell.data.worker import main; main()"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.decoder = subprocess.Popen([sys.executable, "-c", program], text=True, **pipes)  # type: ignore[call-overload]

    def take(self, content: bytes) -> None:
        self.path.write_bytes(content)
        job = {"task": "inspect", "path": str(self.path), "limits": asdict(Limits(time=4.0))}
        assert self.decoder.stdin is not None and self.decoder.stdout is not None
        print(json.dumps(job), file=self.decoder.stdin, flush=True)
        line = self.decoder.stdout.readline()
        assert line, "the decoder crashed"
        message = json.loads(line).get("error", "")
        assert "\n" not in message and len(message) <= 300 and (not message or self.path.name in message), line

    def close(self) -> None:
        self.decoder.kill()
        self.decoder.communicate()


class Request(Target):
    name = "explore"

    def make(self, folder: Path) -> None:
        self.server = Server(0)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        host = "Host: 127.0.0.1:PORT\r\n\r\n"
        base = "kind=kcp&M=57600&N=256&m=8x20x20x18&n=4x4x4x4&K=4&CA=4&CB=2&gates=4&rows=96&shared=no"
        tree = "kind=ht&M=4096&N=64&m=&n=&r=3&gates=1&rows=7&shared=A1"
        paths = (
            "/",
            "/api/formats",
            f"/api/explore?{base}",
            f"/api/explore?{tree}",
            f"/api/explore?{base}&order=optimal",
        )
        self.seeds = [f"GET {path} HTTP/1.1\r\n{host}".encode() for path in paths]

    def mutate(self, chance: random.Random) -> bytes:
        request = chance.choice(self.seeds)
        if chance.random() < 0.6 and b"?" in request:  # one field, with a text of any kind
            head, _, rest = request.partition(b"?")
            query, _, tail = rest.partition(b" ")
            fields = query.split(b"&")
            at = chance.randrange(len(fields))
            value = str(chance.choice(mutate.STRANGE)) if chance.random() < 0.5 else _number(chance)
            name = fields[at].partition(b"=")[0]
            fields[at] = name + b"=" + "".join(c if c.isalnum() else f"%{ord(c) & 255:02x}" for c in value).encode()
            fields += fields[: chance.choice((0, 0, 0, 3, 40))]
            return head + b"?" + b"&".join(fields) + b" " + tail
        return mutate.octets(chance, request)

    def take(self, content: bytes) -> None:
        content = content.replace(b"PORT", str(self.server.server_port).encode())
        with socket.create_connection(("127.0.0.1", self.server.server_port), timeout=5) as connection:
            reply = b""
            try:
                connection.sendall(content)
                connection.shutdown(socket.SHUT_WR)
                while block := connection.recv(1 << 16):
                    reply += block
            except TimeoutError:
                raise
            except OSError:  # it refused before it had read everything, and hung up
                return
        line = content.partition(b"\n")[0]
        if len(line.split()) != 3 or b"\n\r\n" not in content:
            return  # not a whole request, or of HTTP 0.9: an answer without a head, or none
        assert reply.startswith(b"HTTP/1."), (content[:300], reply[:300])
        assert reply.split()[1] not in (b"500", b"503"), reply[-300:]
        assert b"Content-Security-Policy" in reply

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def _number(chance: random.Random) -> str:
    if chance.random() < 0.5:
        return str(chance.choice((0, 1, 2, 3, 7, 97, 1023, 4096, 99991, 10**6, 99_999_989, 10**8, 2**60)))
    return "x".join(str(chance.randint(1, chance.choice((2, 9, 99)))) for _ in range(chance.randint(1, 9)))


TARGETS: tuple[type[Target], ...] = (
    SavedConfig, SavedTensors, StateFile, Record, CheckpointTensors, Status, Result, Description, Settings, Reported,
    Manifest, StoredClip, Clip, Request,
)  # fmt: skip


def quietly(target: Target, content: bytes) -> None:
    """`take` without the warnings that a replaced clip gives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target.take(content)


__all__ = ["TARGETS", "Target", "quietly"]
