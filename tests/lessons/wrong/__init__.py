"""Plausible wrong solutions of the exercises. Each must lose points (test_exercises.py).

A file for each lesson, `lesson_NN.py`, with WRONG: a name -> replacements in solution.py, (text, other text); each text
occurs there exactly once.
"""
