"""Boson AI's Higgs Audio v2: text to 24 kHz speech, in the voice of a recording and its text if they are given."""
