"""ONNX graphs: reading, editing, cutting, and the values that lie between two sites."""
