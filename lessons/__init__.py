"""The course: a lesson for each part of the engine, exercises that grade themselves, and the P/D demo.

Loaded as the package `nanopd_lessons`, by `nanopd lesson …` and by the scripts of the lessons.
"""
