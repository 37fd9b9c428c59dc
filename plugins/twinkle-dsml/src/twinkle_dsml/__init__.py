"""twinkle's templates for DeepSeek V4 and V3.2: their markup DSML, to text and back."""
