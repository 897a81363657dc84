"""CUDA streams between a source of weights and a transport that reads on streams of its own."""

from collections.abc import Iterator

import torch


def readable_on_other_streams(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """`tensors`, made on the stream that is current now, each readable on the stream that is current where it is requested.

    A transport requests tensors inside side streams, which alternate. Left alone, a source would receive a bucket on one of them
    and hand out its pieces on another, which has waited for nothing; the parameters themselves are the optimizer's, on the
    default stream. And the allocator would give a freed tensor's memory to the next one while a side stream still reads it. So

    - the source always runs on one stream, whatever stream is current when a tensor is requested,
    - the requesting stream waits for that stream's work up to here, on the GPU and not on the host,
    - the allocator is notified that the requesting stream reads the tensor (`record_stream`).

    The source must leave a tensor's values as they are until the transport has read it; see `WeightSource`.
    """
    return _readable(tensors, torch.cuda.current_stream())  # not in the generator, which begins at the first request


def _readable(tensors: Iterator[tuple[str, torch.Tensor]], source: torch.cuda.Stream) -> Iterator[tuple[str, torch.Tensor]]:
    while True:
        reader = torch.cuda.current_stream()
        with torch.cuda.stream(source):
            item = next(tensors, None)
        if item is None:
            return
        if reader != source:
            reader.wait_stream(source)
            item[1].record_stream(reader)
        yield item
