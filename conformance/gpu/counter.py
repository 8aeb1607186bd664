"""Holds so many MiB of GPU memory, counts on the GPU, and says whether all is right.

    counter.py MIB LOG

Each line of LOG is a step: its number, which is counted on the GPU, and whether one block of the memory
is what it was. After SIGUSR1 the next line is about all blocks. After SIGUSR2 it has the GPU work for some
seconds, and says so first. It needs nothing but CUDA's driver.
"""

import ctypes
import signal
import sys
import time

BLOCK = 1 << 20
# The GPU fills as many bytes as often: about 0.4 ms each on an H200.
SCRATCH, FILLS = 1 << 30, 30000
cuda = ctypes.CDLL("libcuda.so.1")


def call(name, *arguments):
    """Calls the driver."""
    code = getattr(cuda, name)(*arguments)
    if code:
        sys.exit(f"{name}: {code}")


def value(block):
    """Returns the number that a block is full of."""
    return (block * 2654435761 + 1) % (1 << 32)


blocks, log = int(sys.argv[1]), sys.argv[2]
device, context = ctypes.c_int(), ctypes.c_void_p()
memory, counter = ctypes.c_uint64(), ctypes.c_uint64()
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(blocks * BLOCK))
call("cuMemAlloc_v2", ctypes.byref(counter), ctypes.c_size_t(4))
for block in range(blocks):
    place = ctypes.c_uint64(memory.value + block * BLOCK)
    call("cuMemsetD32_v2", place, ctypes.c_uint(value(block)), ctypes.c_size_t(BLOCK // 4))
call("cuMemsetD32_v2", counter, ctypes.c_uint(0), ctypes.c_size_t(1))
found, step = ctypes.create_string_buffer(BLOCK), ctypes.c_uint32()


def is_right(block):
    """Compares a block with what it was filled with."""
    place = ctypes.c_uint64(memory.value + block * BLOCK)
    call("cuMemcpyDtoH_v2", found, place, ctypes.c_size_t(BLOCK))
    return found.raw == value(block).to_bytes(4, "little") * (BLOCK // 4)


def work():
    """Gives the GPU work, and does not wait for it."""
    scratch = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(scratch), ctypes.c_size_t(SCRATCH))
    for number in range(FILLS):
        count = ctypes.c_size_t(SCRATCH // 4)
        call("cuMemsetD32Async", scratch, ctypes.c_uint(number), count, ctypes.c_void_p())


wanted, asked = [], []
signal.signal(signal.SIGUSR1, lambda *_: wanted.append(True))
signal.signal(signal.SIGUSR2, lambda *_: asked.append(True))
with open(log, "a", buffering=1) as out:
    while True:
        call("cuMemcpyDtoH_v2", ctypes.byref(step), counter, ctypes.c_size_t(4))
        step.value += 1
        call("cuMemcpyHtoD_v2", counter, ctypes.byref(step), ctypes.c_size_t(4))
        if asked:
            asked.clear()
            out.write(f"{step.value} works\n")
            work()
        if wanted:
            wanted.clear()
            right = all(is_right(block) for block in range(blocks))
            out.write(f"{step.value} all {right}\n")
        else:
            out.write(f"{step.value} one {is_right(step.value % blocks)}\n")
        time.sleep(0.02)
