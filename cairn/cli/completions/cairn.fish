# completion of cairn in fish: `cairn completion fish --install`
function __cairn_complete
    for row in (cairn --complete (commandline --cut-at-cursor --current-process | string collect) 2>/dev/null)
        if string match -q '*:files' -- $row
            __fish_complete_path (commandline --cut-at-cursor --current-token)
        else
            echo $row
        end
    end
end
complete --command cairn --no-files --arguments '(__cairn_complete)'
