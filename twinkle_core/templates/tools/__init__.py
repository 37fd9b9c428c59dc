"""The ways in which models write tool calls (L1): ``forms.py`` names them, one a file."""
