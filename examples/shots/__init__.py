"""Tasks from outside of diffquant: many-shot classification, the order of demonstrations, and loss by position.

python -m examples.shots sweep TRANSFORMER DIFF -o trec --tasks many-shot:6,many-shot:48 --train FILE --test FILE
"""
