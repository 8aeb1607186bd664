"""Answers each line with how many it has been sent in all, and whether it is still the same."""

import asyncio
import os

boot = int.from_bytes(os.urandom(6), "big")
count = 0


async def serve(reader, writer):
    global count
    while line := await reader.readline():
        count += 1
        writer.write(f"{boot} {count} {line.decode()}".encode())
        await writer.drain()


async def main():
    server = await asyncio.start_server(serve, "0.0.0.0", 7000)
    await server.serve_forever()


asyncio.run(main())
