"""Many-shot classification and its robustness to the order of demonstrations: tasks from outside of diffquant.

python -m examples.shots sweep TRANSFORMER DIFF -o trec --tasks many-shot:6,many-shot:48 --train FILE --test FILE
"""
