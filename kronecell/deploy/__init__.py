"""Files: save and load, ONNX; whole files and locks (atomic), which every other package writes through."""
