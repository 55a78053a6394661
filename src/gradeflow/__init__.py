"""Teach LoRA adapters with graded work, and be able to say afterwards why the champion is the champion."""
