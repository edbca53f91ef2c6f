"""Handing a result on: a folder that needs no run, its model card, ONNX, the layout of the Hugging Face hub."""
