"""What serving code does with a checkpoint on one host: check it, stream its layers, load the rest.

    python examples/serve.py CHECKPOINT

It needs torch; the model here is a dictionary of tensors on the device.
"""

from __future__ import annotations

import argparse
import sys

import torch

from kda_stream import (
    BindError,
    Checkpoint,
    KdaConfig,
    KdaLayer,
    KdaStreamError,
    MappingSource,
    check_kda_weights,
    identify_family,
    iter_torch_weights,
    open_checkpoint,
    stream_kda_layers,
)

Model = dict[str, torch.Tensor]


def main() -> int:
    """Load the checkpoint that the command line names; the exit status."""
    parser = argparse.ArgumentParser(description="Load a checkpoint as serving code does.")
    parser.add_argument("checkpoint")
    path = parser.parse_args().checkpoint
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: Model = {}
    try:
        with open_checkpoint(path) as checkpoint:
            load(checkpoint, model, device)
            check_again(checkpoint)
    except BindError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        return 1
    except KdaStreamError as error:
        print(f"{error.code.value}: {error}", file=sys.stderr)
        return 2
    print(f"{len(model)} tensors, {sum(t.nbytes for t in model.values())} bytes on {device}")
    return 0


def load(checkpoint: Checkpoint, model: Model, device: torch.device) -> None:
    """The KDA layers, bound and checked; then every other tensor as it is stored."""
    bound: set[str] = set()
    with stream_kda_layers(checkpoint, slots=3, lock="prefer", family="auto") as stream:
        for layer in stream:
            bound |= upload(checkpoint, layer, model, device)
    print(f"{stream.report.layers} KDA layers by {dict(stream.report.reads)}")
    others = [name for name in checkpoint if name not in bound]
    for name, tensor in iter_torch_weights(checkpoint, names=others):
        model[name] = tensor.to(device, copy=True)


def upload(checkpoint: Checkpoint, layer: KdaLayer, model: Model, device: torch.device) -> set[str]:
    """Copy a layer's tensors to the device; the names of the stored ones that they are made of."""
    for field, tensor in layer.weights.items():
        model[f"kda.{layer.index}.{field}"] = tensor.torch().to(device, copy=True)
    source = checkpoint.layer(layer.index)
    family = identify_family(source)
    return {f"{source.prefix}{name}" for name in family.names}


def check_again(checkpoint: Checkpoint) -> None:
    """Tensors that are in memory are a source too, by their names."""
    source = checkpoint.layer(stream_kda_layers(checkpoint, family="auto").layers[0])
    held = {f"{source.prefix}{name}": source.get(name) for name in source.names()}
    report = check_kda_weights(
        KdaConfig.from_json(checkpoint.config or {}),
        source.index,
        MappingSource(held, prefix=source.prefix),
        family="auto",
    )
    print(f"layer {source.index} is {report.family}: {report.bound} tensors, {report.bytes} bytes")


if __name__ == "__main__":
    sys.exit(main())
