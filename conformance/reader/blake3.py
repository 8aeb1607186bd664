"""BLAKE3 with 256 bits of output, after the paper "BLAKE3: one function, fast everywhere"."""

IV = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
CHUNK_START, CHUNK_END, PARENT, ROOT = 1, 2, 4, 8
CHUNK, BLOCK = 1024, 64
MASK = 0xFFFFFFFF

# The words of the message in the order in which each of the seven rounds takes them.
SCHEDULE = [tuple(range(16))]
for _ in range(6):
    SCHEDULE.append(tuple(SCHEDULE[-1][i] for i in PERMUTATION))

# The four columns, then the four diagonals.
MIXES = (
    (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
    (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14),
)


def compress(chaining, block, counter, flags):
    """Compresses one block of at most 64 bytes into eight words."""
    padded = block.ljust(BLOCK, b"\0")
    words = [int.from_bytes(padded[i:i + 4], "little") for i in range(0, BLOCK, 4)]
    v = [*chaining, *IV[:4], counter & MASK, counter >> 32, len(block), flags]
    for order in SCHEDULE:
        place = 0
        for a, b, c, d in MIXES:
            va, vb, vc, vd = v[a], v[b], v[c], v[d]
            va = (va + vb + words[order[place]]) & MASK
            vd ^= va
            vd = (vd >> 16 | vd << 16) & MASK
            vc = (vc + vd) & MASK
            vb ^= vc
            vb = (vb >> 12 | vb << 20) & MASK
            va = (va + vb + words[order[place + 1]]) & MASK
            vd ^= va
            vd = (vd >> 8 | vd << 24) & MASK
            vc = (vc + vd) & MASK
            vb ^= vc
            vb = (vb >> 7 | vb << 25) & MASK
            v[a], v[b], v[c], v[d] = va, vb, vc, vd
            place += 2
    return [v[i] ^ v[i + 8] for i in range(8)]


def subtree(content, first, root):
    """Returns the chaining value over `content`, whose first chunk has the number `first`."""
    if len(content) <= CHUNK:
        chaining = IV
        blocks = [content[i:i + BLOCK] for i in range(0, len(content), BLOCK)] or [b""]
        for number, block in enumerate(blocks):
            flags = CHUNK_START if number == 0 else 0
            if number == len(blocks) - 1:
                flags |= CHUNK_END | root
            chaining = compress(chaining, block, first, flags)
        return chaining
    # The left half is the largest power of two of chunks that leaves something to the right.
    chunks = 1
    while chunks * 2 * CHUNK < len(content):
        chunks *= 2
    left = subtree(content[:chunks * CHUNK], first, 0)
    right = subtree(content[chunks * CHUNK:], first + chunks, 0)
    block = b"".join(word.to_bytes(4, "little") for word in left + right)
    return compress(IV, block, 0, PARENT | root)


def blake3(content):
    """Returns the 32 bytes of the hash."""
    return b"".join(word.to_bytes(4, "little") for word in subtree(bytes(content), 0, ROOT))
