"""The fake driver's host memory, streams, events and copies."""

# Its methods are called as the driver's functions are, and take what those take.
# ruff: noqa: N802, ARG002

import ctypes
from collections import deque

from tests.transfer.cuda.fake_machine import (
    ILLEGAL_ADDRESS,
    INVALID_CONTEXT,
    INVALID_HANDLE,
    INVALID_VALUE,
    NOT_READY,
    OK,
    READ,
    READ_WRITE,
)  # fmt: skip


class Copies:
    """Copies happen when the queue is looked at, not when they are asked for."""

    # -- Host memory -------------------------------------------------------------------

    def _cuMemAllocHost_v2(self, pointer, size):
        if self._device_now() is None:
            return INVALID_CONTEXT
        buffer = (ctypes.c_ubyte * size.value)()
        pointer._obj.value = ctypes.addressof(buffer)
        self.pinned[pointer._obj.value] = buffer
        return OK

    def _cuMemFreeHost(self, pointer):
        if self._device_now() is None:
            return INVALID_CONTEXT
        buffer = self.pinned.pop(pointer.value, None)
        if buffer is None:
            return self._fault("host memory was freed twice")
        begin, end = pointer.value, pointer.value + len(buffer)
        if any(
            begin <= place < end
            for work in self.streams.values()
            for job in work
            for place in job[1]
        ):
            self.faults.append("host memory was freed under a copy")
        return OK

    def _cuMemHostRegister_v2(self, pointer, size, flags):
        if self._device_now() is None:
            return INVALID_CONTEXT
        self.pinned[pointer.value] = range(size.value)  # only its length is looked at
        return OK

    def _cuMemHostUnregister(self, pointer):
        if self.pinned.pop(pointer.value, None) is None:
            return self._fault("memory was unpinned twice")
        return OK

    def _is_pinned(self, pointer, size):
        return any(
            begin <= pointer and pointer + size <= begin + len(buffer)
            for begin, buffer in self.pinned.items()
        )

    # -- Streams, events, copies -------------------------------------------------------

    def _cuStreamCreate(self, stream, flags):
        if self._device_now() is None:
            return INVALID_CONTEXT
        stream._obj.value = next(self._numbers)
        self.streams[stream._obj.value] = deque()
        return OK

    def _cuStreamDestroy_v2(self, stream):
        work = self.streams.pop(stream.value, None)
        if work is None:
            return self._fault("a stream was destroyed twice", INVALID_HANDLE)
        if work:
            self.faults.append("a stream was destroyed with copies in it")
        return OK

    def _cuStreamSynchronize(self, stream):
        if stream.value is None:
            return OK if self._device_now() is not None else INVALID_CONTEXT
        return self._advance(stream.value, None)

    def _cuEventCreate(self, event, flags):
        if self._device_now() is None:
            return INVALID_CONTEXT
        event._obj.value = next(self._numbers)
        self.events[event._obj.value] = None
        return OK

    def _cuEventDestroy_v2(self, event):
        if event.value not in self.events:
            return self._fault("an event was destroyed twice", INVALID_HANDLE)
        del self.events[event.value]
        return OK

    def _cuEventRecord(self, event, stream):
        if event.value not in self.events or stream.value not in self.streams:
            return INVALID_HANDLE
        self.events[event.value] = [stream.value, self.polls]
        self.streams[stream.value].append((None, (), event.value))
        return OK

    def _cuEventQuery(self, event):
        if event.value not in self.events:
            return INVALID_HANDLE
        state = self.events[event.value]
        if state is None:
            return OK
        state[1] -= 1
        if state[1] > 0:
            return NOT_READY
        return self._advance(state[0], event.value)

    def _advance(self, stream, until):
        work = self.streams[stream]
        while work:
            job, _, mark = work.popleft()
            if job is None:
                self.events[mark] = None
                if mark == until:
                    return OK
            elif not job():
                return ILLEGAL_ADDRESS
        return OK

    def _queue(self, stream, places, job):
        if self._device_now() is None:
            return INVALID_CONTEXT
        if stream.value not in self.streams:
            return INVALID_HANDLE
        device = self._device_now()

        def run():
            self._stack.append(device + 1)
            try:
                return job()
            finally:
                self._stack.pop()

        self.streams[stream.value].append((run, places, None))
        return OK

    def _cuMemsetD8_v2(self, address, value, size):
        memory = self._reach(address.value, size.value, READ_WRITE)
        if memory is None:
            return INVALID_VALUE
        memory[:] = bytes([value.value]) * size.value
        return OK

    def _cuMemcpyDtoDAsync_v2(self, target, source, size, stream):
        places = (target.value, source.value)

        def job():
            read = self._reach(source.value, size.value, READ)
            write = self._reach(target.value, size.value, READ_WRITE)
            if read is None or write is None:
                return False
            write[:] = bytes(read)
            return True

        return self._queue(stream, places, job)

    def _cuMemcpyDtoHAsync_v2(self, target, source, size, stream):
        if not self._is_pinned(target.value, size.value):
            return self._fault("a copy into memory that is not pinned")

        def job():
            read = self._reach(source.value, size.value, READ)
            if read is None:
                return False
            ctypes.memmove(target.value, bytes(read), size.value)
            return True

        return self._queue(stream, (target.value, source.value), job)

    def _cuMemcpyHtoDAsync_v2(self, target, source, size, stream):
        if not self._is_pinned(source.value, size.value):
            return self._fault("a copy out of memory that is not pinned")

        def job():
            write = self._reach(target.value, size.value, READ_WRITE)
            if write is None:
                return False
            write[:] = ctypes.string_at(source.value, size.value)
            return True

        return self._queue(stream, (target.value, source.value), job)
