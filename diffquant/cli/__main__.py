from diffquant.cli import main

main()
