"""The meeting of the nodes' launchers: before the ranks start, while they train, and between two attempts.

torch is silent about nodes that are missing, and a rank about one that is gone. So the launcher of node 0 listens at
the port after the master port, and those of the other nodes call it. They print whom they wait for, compare what they
are about to run, end together with the error of one of them, and see within seconds that a node is gone.

Who may take part shows that it knows a secret of the run (`secret_lines`). There are two:

- the folder's: node 0 writes it into the run directory. Whoever can read it shares the folder, as every node must.
- the call's: what `--hostfile` sent to each host over ssh; without it the command itself, which is the same on every
  node. Who knows no more than the call can end a start, with its error or with the word that it does not see the
  folder, and nothing else.
"""
