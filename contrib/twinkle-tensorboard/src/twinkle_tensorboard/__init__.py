"""Watch training with twinkle in TensorBoard."""

from twinkle_tensorboard.writer import TensorBoardWriter as TensorBoardWriter
