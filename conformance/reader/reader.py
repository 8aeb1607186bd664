#!/usr/bin/env python3
"""Unpacks a checkpoint from an OCI image layout: reader.py LAYOUT NAME OUT

Written from spec/artifact.md alone, to show that it says enough, with Python's standard library.
Signatures are not looked at. A refusal ends with 2 and {"error": {"reason": …}} on standard output.
"""

import hashlib
import json
import os
import re
import shutil
import struct
import sys
import tempfile

sys.dont_write_bytecode = True  # Nothing is left beside the program.

from blake3 import blake3  # noqa: E402

MIB = 1 << 20
PAGE, CHUNK = 4096, 4 * MIB
DOCUMENT_MAX, FACTS_MAX, BLOB_MAX, DUMP_MAX = 4 * MIB, MIB, 256 * MIB, 4 << 40
FILES_MAX, SHARDS_MAX = 1 << 20, 1 << 16

OCI = "application/vnd.oci.image."
OCI_INDEX, OCI_MANIFEST = OCI + "index.v1+json", OCI + "manifest.v1+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
OURS = "application/vnd.kybernate.checkpoint."
ARTIFACT, CONFIG = OURS + "v1+json", OURS + "config.v1+json"
PAGE_INDEX, IMAGES, PAGES = OURS + "index.v1", OURS + "images.v1", OURS + "pages.v1"
DEVICE = OURS + "device.v1"
PAGE_HASHES, VOLUME = OURS + "pagehash.v1", OURS + "volume.v1.tar"
DESTINATION, PART = "io.kybernate.volume.destination", "io.kybernate.volume.part"


class Refused(Exception):
    """A rule of the specification is broken; the first argument is the reason."""


def refuse_unless(condition, reason, what=""):
    if not condition:
        raise Refused(reason, what)


# §1 Documents and content


def once(pairs):
    """Makes an object of its members, each of which comes once."""
    members = dict(pairs)
    refuse_unless(len(members) == len(pairs), "document", "a member comes twice")
    return members


def no_number(text):
    raise Refused("document", f"{text} is no JSON")


def parse(content):
    try:
        document = json.loads(content, object_pairs_hook=once, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        raise Refused("document", str(error)) from error
    refuse_unless(isinstance(document, dict), "document", "it is no object")
    return document


def member(document, name, kind, default=None):
    """Returns a member of a type. Without a default it must be there."""
    if name not in document and default is not None:
        return default
    value = document.get(name)
    right = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
    refuse_unless(right, "document", f"{name} is {value!r}")
    return value


def descriptor(value):
    """Checks what every descriptor has."""
    refuse_unless(isinstance(value, dict), "document", "a descriptor is no object")
    member(value, "mediaType", str)
    refuse_unless(member(value, "size", int) >= 0, "document", "a size is negative")
    form = r"(sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128})"
    known = re.fullmatch(form, member(value, "digest", str))
    refuse_unless(known, "document", f"digest {value['digest']!r}")
    annotations = member(value, "annotations", dict, {})
    refuse_unless(all(isinstance(text, str) for text in annotations.values()), "document", "annotations")
    return value


def own_type(document):
    return member(document, "mediaType", str, "")


class Layout:
    """An OCI image layout."""

    def __init__(self, root):
        self.root = root

    def entry(self, name):
        with open(os.path.join(self.root, "index.json"), "rb") as file:
            entries = json.load(file)["manifests"]
        key = "org.opencontainers.image.ref.name"
        return next(e for e in entries if e.get("annotations", {}).get(key) == name)

    def open(self, described):
        """Opens a blob whose length is as described."""
        algorithm, digits = described["digest"].split(":")
        try:
            file = open(os.path.join(self.root, "blobs", algorithm, digits), "rb")
        except FileNotFoundError as error:
            raise Refused("missing", described["digest"]) from error
        length = os.fstat(file.fileno()).st_size
        if length != described["size"]:
            file.close()
            raise Refused("digest-mismatch", f"{length} bytes of {described['size']}")
        return file

    def read(self, described, most=None):
        """Reads a whole blob and proves it."""
        if most is not None and described["size"] > most:
            raise Refused("document-too-large", f"{described['size']} bytes")
        with self.open(described) as file:
            content = file.read()
        algorithm, digits = described["digest"].split(":")
        same = hashlib.new(algorithm, content).hexdigest() == digits
        refuse_unless(same, "digest-mismatch", described["digest"])
        return content


def read_index(layout, name):
    """Returns the checkpoint child."""
    entry = layout.entry(name)
    index = parse(layout.read(entry, DOCUMENT_MAX))
    kind = own_type(index) or entry["mediaType"]
    ours = kind == OCI_INDEX and index.get("artifactType") == ARTIFACT
    refuse_unless(ours, "not-a-checkpoint", kind)
    refuse_unless(member(index, "schemaVersion", int) == 2, "document", "schemaVersion")
    refuse_unless("config" not in index and "layers" not in index, "document", "a manifest too")
    if "subject" in index:
        descriptor(index["subject"])
    children = [descriptor(child) for child in member(index, "manifests", list)]
    own = [child for child in children if child.get("artifactType") == ARTIFACT]
    others = [child for child in children if child.get("artifactType") != ARTIFACT]
    images = all(child["mediaType"] in (OCI_MANIFEST, DOCKER_MANIFEST) for child in others)
    refuse_unless(len(own) == 1 and len(others) <= 1 and images, "children")
    return own[0]


def read_manifest(layout, child):
    refuse_unless(child["mediaType"] == OCI_MANIFEST, "manifest", child["mediaType"])
    manifest = parse(layout.read(child, DOCUMENT_MAX))
    refuse_unless(member(manifest, "schemaVersion", int) == 2, "document", "schemaVersion")
    refuse_unless("manifests" not in manifest, "document", "an index too")
    config = descriptor(member(manifest, "config", dict))
    for layer in member(manifest, "layers", list):
        descriptor(layer)
    right = (
        own_type(manifest) in ("", OCI_MANIFEST)
        and manifest.get("artifactType") == ARTIFACT
        and "subject" not in manifest
        and config["mediaType"] == CONFIG
    )
    refuse_unless(right, "manifest")
    return manifest


def places(path):
    """Returns the directories that lead to a destination."""
    return tuple(part for part in path.split("/") if part not in ("", "."))


def sort_layers(manifest, has_device):
    """Returns the layers by kind; shards of device memory are among those of pages."""
    kinds = {kind: [] for kind in (PAGE_INDEX, IMAGES, PAGES, PAGE_HASHES, VOLUME)}
    for layer in manifest["layers"]:
        kind = layer["mediaType"]
        if kind == DEVICE and has_device:
            kind = PAGES
        refuse_unless(kind in kinds, "layers", kind)
        kinds[kind].append(layer)
    right = (
        len(kinds[PAGE_INDEX]) == 1
        and len(kinds[IMAGES]) == 1
        and len(kinds[PAGE_HASHES]) <= 1
        and len(kinds[PAGES]) <= SHARDS_MAX
    )
    refuse_unless(right, "layers")
    for layer in kinds[IMAGES] + kinds[PAGES] + kinds[VOLUME]:
        refuse_unless(layer["size"] <= BLOB_MAX, "blob-too-large")
    destinations, last, expected = set(), None, None
    for layer in kinds[VOLUME]:
        annotations = layer.get("annotations", {})
        path, part = annotations.get(DESTINATION, ""), annotations.get(PART)
        if expected is not None and path == last and part == str(expected):
            expected += 1
            continue
        usable = (
            path.startswith("/")
            and ".." not in path.split("/")
            and "\0" not in path
            and len(path.encode("utf-8", "surrogatepass")) <= 4096
            and places(path) not in destinations
            and part in (None, "0")
        )
        refuse_unless(usable, "volume", repr(path))
        destinations.add(places(path))
        last, expected = path, None if part is None else 1
    return kinds


# §3 Facts

TEXT, FLAG, NUMBER, DIGEST = "text", "flag", "number", "digest"
MOUNT = {"destination": TEXT, "type": TEXT, "options": [TEXT], "external": FLAG}
XSAVE = {"features": NUMBER, "bytes": NUMBER, "bytesMax": NUMBER}
GPU = {"uuid": TEXT, "model": TEXT, "memoryBytes": NUMBER, "computeCapability": TEXT}
FACTS = {
    "version": TEXT, "created": TEXT, "notAfter": TEXT,
    "source": {
        "cluster": TEXT, "namespace": TEXT, "serviceAccount": TEXT, "podTemplateHash": TEXT,
        "container": TEXT, "image": TEXT, "imageDigest": DIGEST,
    },
    "lineage": {"generation": NUMBER, "base": DIGEST},
    "node": {
        "architecture": TEXT, "kernel": TEXT, "pageBytes": NUMBER, "cgroup": TEXT, "lsm": TEXT,
        "cpu": {"vendor": TEXT, "model": TEXT, "features": [TEXT], "xsave": XSAVE},
        "criu": TEXT, "runtime": TEXT, "containerd": TEXT, "os": TEXT, "seccomp": FLAG,
        "devices": [TEXT], "gpu": {"driver": TEXT, "cuda": TEXT, "devices": [GPU]},
    },
    "needs": {
        "mounts": [MOUNT], "devices": [TEXT], "hostNamespaces": [TEXT],
        "identity": {
            "uids": [NUMBER], "gids": [NUMBER], "capabilities": [TEXT],
            "noNewPrivileges": FLAG, "seccomp": FLAG,
        },
    },
    "device": {
        "storage": ("none", "pages", "device"), "gpus": [TEXT],
        "streams": [{"file": TEXT, "pid": NUMBER, "gpu": TEXT, "bytes": NUMBER}],
    },
    "sizes": {
        "processes": NUMBER, "threads": NUMBER, "dumpBytes": NUMBER, "bulkBytes": NUMBER,
        "pageBytes": NUMBER,
    },
}


def check_fact(value, form, name):
    if isinstance(form, dict):
        right = isinstance(value, dict)
        for key, inner in form.items() if right else ():
            if key in value:
                check_fact(value[key], inner, key)
    elif isinstance(form, list):
        right = isinstance(value, list)
        for item in value if right else ():
            check_fact(item, form[0], name)
    elif isinstance(form, tuple):
        right = value in form
    elif form == FLAG:
        right = isinstance(value, bool)
    elif form == NUMBER:
        right = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    else:
        right = isinstance(value, str)
    refuse_unless(right, "document", f"{name} is {value!r}")


def read_device(facts):
    """Returns whether there is device memory in files, and their lengths by name."""
    device = facts.get("device", {})
    is_aside = device.get("storage", "none") == "device"
    gpus, streams = device.get("gpus", []), {}
    if not gpus:
        gpus = [one.get("uuid") for one in facts.get("node", {}).get("gpu", {}).get("devices", [])]
    for stream in device.get("streams", []):
        file, gpu = member(stream, "file", str), member(stream, "gpu", str)
        pid, length = member(stream, "pid", int), member(stream, "bytes", int)
        refuse_unless(pid < 1 << 32, "document", f"pid {pid}")
        refuse_unless(is_aside, "device", "storage")
        digits = re.fullmatch(r"GPU-([0-9a-f]{8})-(.{4})-(.{4})-(.{4})-(.{12})", gpu)
        name = digits and f"device-{pid:x}-{''.join(digits.groups())}.img"
        refuse_unless(name == file and DEVICE_NAME.fullmatch(file), "device", file)
        refuse_unless(gpu in gpus, "device", gpu)
        refuse_unless(file not in streams, "device", file)
        streams[file] = length
    return is_aside, streams


def read_facts(layout, config):
    """Returns bulk, dump and page bytes, and what there is of device memory."""
    facts = parse(layout.read(config, FACTS_MAX))
    check_fact(facts, FACTS, "the facts")
    version = member(facts, "version", str)
    refuse_unless(version.split(".")[0] == "1", "unsupported", version)
    sizes = facts.get("sizes", {})
    device = read_device(facts)
    return [sizes.get(name, 0) for name in ("bulkBytes", "dumpBytes", "pageBytes")], device


# §4 Names and the pack

ALONE = """apparmor binfmt-misc bpfmap-data bpfmap-file cgroup cpuinfo eventfd eventpoll eventpoll-tfd
ext-files fanotify fanotify-mark fifo fifo-data filelocks files inetsk inotify inotify-wd inventory
memfd netlinksk ns-files packetsk pidfd pipes pipes-data pstree reg-files remap-fpath seccomp
signalfd sk-queues timerfd tty tty-data tty-info tunfile unixsk""".split()
NUMBERED = """autofs binfmt-misc core creds fdinfo fs ghost-file ids ifaddr ip6tables ipcns-msg
ipcns-sem ipcns-shm ipcns-var iptables itimers mm mountpoints netdev netns netns-ct netns-exp
nftables pagemap pagemap-shmem pidns posix-timers rlimit route route6 rule sigacts signal-p signal-s
tcp-stream timens userns utsns vmas""".split()
N = "[0-9A-Fa-f]{1,20}"
NAME = re.compile(
    rf"descriptors\.json|({'|'.join(ALONE)})\.img|({'|'.join(NUMBERED)})-{N}\.img"
    rf"|tmpfs-(dev-)?{N}\.tar\.gz\.img|amdgpu-[A-Za-z0-9_-]{{1,64}}\.img"
)
PAGES_NAME = re.compile(rf"pages-{N}\.img")
DEVICE_NAME = re.compile(r"device-(0|[1-9a-f][0-9a-f]{0,7})-[0-9a-f]{32}\.img")


def file_name(name, bulk):
    """Returns a name as text when a file of a dump may have it."""
    text = name.decode("latin-1")
    in_shards = bulk and (PAGES_NAME.fullmatch(text) or DEVICE_NAME.fullmatch(text))
    known = NAME.fullmatch(text) or in_shards
    refuse_unless(known and len(name) <= 255, "file-name", repr(name))
    return text


class Bytes:
    """Binary content, read from its beginning."""

    def __init__(self, content):
        self.content, self.at = content, 0

    def take(self, length):
        piece = self.content[self.at:self.at + length]
        refuse_unless(len(piece) == length, "truncated", f"at byte {self.at}")
        self.at += length
        return piece

    def unpack(self, form):
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def end(self):
        refuse_unless(self.at == len(self.content), "trailing", f"at byte {self.at}")


def create(directory, name):
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    return open(os.open(os.path.join(directory, name), flags, 0o600), "wb")


def unpack_images(content, directory):
    """Writes the files of the pack; returns their names and their length."""
    pack = Bytes(content)
    magic, version, zero, count = pack.unpack("<8sHHI")
    refuse_unless(magic == b"KYBFILES", "header", "magic")
    refuse_unless(version == 1, "unsupported", f"version {version}")
    refuse_unless(zero == 0 and count <= FILES_MAX, "header")
    last, names, total = b"", set(), 0
    for _ in range(count):
        name_length, size = pack.unpack("<HQ")
        name = pack.take(name_length)
        text = file_name(name, bulk=False)
        refuse_unless(name > last, "file-order", text)
        refuse_unless(size <= MIB, "file-size", text)
        with create(directory, text) as file:
            file.write(pack.take(size))
        names.add(text)
        last, total = name, total + size
    pack.end()
    return names, total


# §5 The page index


class PageIndex:
    """What the page index says: per shard its chunks, per file its extents."""

    def __init__(self, content, layers, packed):
        self.input, self.layers, self.names = Bytes(content), layers, set(packed)
        self.shards, self.files = [], []
        self.used = []
        self.page_count = 0
        self.segments_left = self.pages_left = 0
        self.header()
        while self.record():
            pass
        self.input.end()

    def header(self):
        form = "<8sHBBIIIII"
        magic, version, hash_id, flags, shards, files, chunk, page, zero = self.input.unpack(form)
        refuse_unless(magic == b"KYBPAGES", "header", "magic")
        known = version == 1 and hash_id in (1, 2) and flags == 0
        refuse_unless(known, "unsupported", "version, hash or flags")
        right = (chunk, page, zero) == (CHUNK, PAGE, 0) and shards <= SHARDS_MAX and files <= FILES_MAX
        refuse_unless(right, "header")
        self.hash = blake3 if hash_id == 1 else lambda content: hashlib.sha256(content).digest()
        self.announced = (shards, files)

    def record(self):
        (length,) = self.input.unpack("<I")
        refuse_unless(1 <= length <= 16384, "record", f"length {length}")
        body = self.input.take(length)
        kind, payload = body[0], body[1:]
        readers = {1: self.shard, 2: self.file, 3: self.hole, 4: self.run, 5: self.bitmap, 6: self.runs}
        if kind == 0:
            refuse_unless(not payload, "record", "end")
            whole = (len(self.shards), len(self.files)) == self.announced
            refuse_unless(whole and self.segments_left == 0, "records", "an early end")
            return False
        refuse_unless(kind in readers, "unsupported", f"record {kind}")
        readers[kind](payload)
        return True

    def shard(self, payload):
        right = not self.files and len(self.shards) < self.announced[0]
        refuse_unless(right, "records", "a shard out of place")
        refuse_unless(len(payload) % 49 == 0, "record", "chunks")
        chunks, end = [], 0
        for at in range(0, len(payload), 49):
            offset, stored, plain, encoding, digest = struct.unpack_from("<QIIB32s", payload, at)
            refuse_unless(encoding == 0, "unsupported", f"encoding {encoding}")
            right = (
                offset == end
                and stored == plain
                and 0 < plain <= CHUNK
                and plain % PAGE == 0
                and end % CHUNK == 0
            )
            refuse_unless(right, "chunk-table", f"chunk {len(chunks)}")
            chunks.append((offset, stored, digest))
            end += stored
        refuse_unless(0 < end <= BLOB_MAX, "chunk-table", "size")
        number = len(self.shards)
        same = number < len(self.layers) and self.layers[number]["size"] == end
        refuse_unless(same, "shards", f"shard {number}")
        self.shards.append(chunks)
        self.used.append({})

    def file(self, payload):
        right = (
            self.segments_left == 0
            and len(self.shards) == self.announced[0]
            and len(self.files) < self.announced[1]
        )
        refuse_unless(right, "records", "a file out of place")
        refuse_unless(len(self.shards) == len(self.layers), "shards")
        refuse_unless(len(payload) >= 8, "record", "a file")
        (length,) = struct.unpack_from("<Q", payload)
        name = file_name(payload[8:], bulk=True)
        refuse_unless(name not in self.names, "file-twice", name)
        self.names.add(name)
        self.files.append((name, length))
        self.pages_left = -(-length // PAGE)
        self.segments_left = -(-length // CHUNK)
        self.first_page = 0

    def segment(self):
        """Begins a segment; returns how many pages it has."""
        refuse_unless(self.segments_left > 0, "records", "a segment too many")
        count = min(self.pages_left, 1024)
        self.segments_left -= 1
        self.pages_left -= count
        self.first_page += 1024
        return count

    def place(self, first, count, shard, page):
        """Takes note of consecutive pages of the segment that was begun."""
        there = shard < len(self.shards)
        pages = sum(stored for _, stored, _ in self.shards[shard]) // PAGE if there else 0
        refuse_unless(page + count <= pages, "page-range", f"shard {shard} page {page}")
        is_device = bool(DEVICE_NAME.fullmatch(self.files[-1][0]))
        same = (self.layers[shard]["mediaType"] == DEVICE) == is_device
        refuse_unless(same, "shards", f"shard {shard} has another kind of memory")
        base = self.first_page - 1024 + first
        for number in range(count):
            refuse_unless(page + number not in self.used[shard], "page-twice")
            self.used[shard][page + number] = (len(self.files) - 1, base + number)
        self.page_count += count

    def hole(self, payload):
        self.segment()
        refuse_unless(not payload, "record", "hole")

    def run(self, payload):
        count = self.segment()
        refuse_unless(len(payload) == 4, "record", "run")
        self.place(0, count, *struct.unpack("<HH", payload))

    def bitmap(self, payload):
        count = self.segment()
        refuse_unless(len(payload) == 132 and any(payload[4:]), "record", "bitmap")
        shard, page = struct.unpack_from("<HH", payload)
        bits = int.from_bytes(payload[4:], "little")
        refuse_unless(bits >> count == 0, "page-order", "a bit behind the end")
        for bit in range(count):
            if bits >> bit & 1:
                self.place(bit, 1, shard, page)
                page += 1

    def runs(self, payload):
        count = self.segment()
        refuse_unless(payload and len(payload) % 8 == 0, "record", "runs")
        end = 0
        for first, pages, shard, page in struct.iter_unpack("<HHHH", payload):
            right = pages > 0 and first >= end and first + pages <= count
            refuse_unless(right, "page-order", f"run {first} {pages}")
            self.place(first, pages, shard, page)
            end = first + pages


def unpack_pages(layout, index, directory):
    files = []
    try:
        for name, length in index.files:
            files.append(create(directory, name))
            files[-1].truncate(length)
        for layer, chunks, used in zip(index.layers, index.shards, index.used):
            if used:
                unpack_shard(layout, index, (layer, chunks, used), files)
    finally:
        for file in files:
            file.close()


def unpack_shard(layout, index, shard, files):
    layer, chunks, used = shard
    with layout.open(layer) as stored:
        for offset, length, digest in chunks:
            first = offset // PAGE
            wanted = [page for page in range(first, first + length // PAGE) if page in used]
            if not wanted:
                continue
            stored.seek(offset)
            content = stored.read(length)
            refuse_unless(index.hash(content) == digest, "chunk-hash", f"offset {offset}")
            for page in wanted:
                number, file_page = used[page]
                at = (page - first) * PAGE
                room = index.files[number][1] - file_page * PAGE
                files[number].seek(file_page * PAGE)
                files[number].write(content[at:at + min(PAGE, room)])


def unpack(layout, name, directory):
    """Unpacks a checkpoint into an empty directory."""
    manifest = read_manifest(layout, read_index(layout, name))
    (bulk_bytes, dump_bytes, page_bytes), device = read_facts(layout, manifest["config"])
    has_device, streams = device
    kinds = sort_layers(manifest, has_device)
    packed, packed_bytes = unpack_images(layout.read(kinds[IMAGES][0]), directory)
    refuse_unless(bulk_bytes <= DUMP_MAX, "too-large", f"{bulk_bytes} bytes")
    refuse_unless(packed_bytes + bulk_bytes == dump_bytes, "sizes", "the dump")
    described = kinds[PAGE_INDEX][0]
    refuse_unless(described["size"] <= bulk_bytes // 400 + MIB, "index-too-large")
    index = PageIndex(layout.read(described), kinds[PAGES], packed)
    refuse_unless(len(index.shards) == len(kinds[PAGES]), "shards")
    refuse_unless(sum(length for _, length in index.files) == bulk_bytes, "sizes", "bulk files")
    refuse_unless(index.page_count * PAGE == page_bytes, "sizes", "pages")
    files = {name: length for name, length in index.files if DEVICE_NAME.fullmatch(name)}
    refuse_unless(files == streams, "device", "files and facts")
    for hashes in kinds[PAGE_HASHES]:
        refuse_unless(hashes["size"] == 16 * index.page_count, "sizes", "page hashes")
    unpack_pages(layout, index, directory)


def main():
    if len(sys.argv) != 4:
        print(__doc__, file=sys.stderr)
        return 64
    layout, name, out = sys.argv[1:]
    beside = os.path.dirname(os.path.abspath(out))
    directory = tempfile.mkdtemp(prefix=".unpack-", dir=beside)
    try:
        unpack(Layout(layout), name, directory)
        os.rename(directory, out)
    except Refused as refused:
        reason, what = refused.args
        print(json.dumps({"error": {"reason": reason}}))
        print(f"refused ({reason}): {what}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
