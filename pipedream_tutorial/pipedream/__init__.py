"""Simulate pipeline schedules exactly, and train models with them.

schedules/   orders, weight versions, closed forms
simulate/    the exact clock, comparison, search
train/       stages that train, split backward passes, checks against autograd
runtime/     one process per stage, records, predictions
draw/        tables and pictures
lecture/     checks for the notebook's exercises
"""
