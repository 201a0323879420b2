"""ONNX graphs, by role.

``files``: read and write ONNX files, their weights beside them. ``graph``: the one :class:`~.graph.Graph`, who computes
and who reads each value, and cuts. ``nodes``: what the exporter wrote about a node. ``outputs``: which values are
outputs. ``precision``: the same computation in another dtype. ``cut``: one site's operators as a model of their own.

A backend's author needs ``files.read_graph``, ``outputs.add_outputs``, ``files.place_weights`` and
:func:`ditto_core.errors.first_line`.

Why not onnx-ir (tried: onnx-ir 1.1.0, onnx 1.23.2, CPU): a file of 2,000 nodes with the exporter's metadata loads in
166 to 239 ms against 3 ms by protobuf, and takes 90 to 118 ms to be a ``ModelProto`` again, which each of the hundreds
of parts that a search builds has to be; importing it costs 0.8 s more; and it refuses weights files with several hard
links ("may indicate a hard link attack"), as those of cached engines are.
"""
